//! A reference, a string or a `bool` is not made of bytes.
#![forbid(unsafe_code)]

use leasehold::kernel::CpuArgs;

fn tile(args: &CpuArgs<'_>) {
    let _reference: &'static u8 = args.params();
    let _text: &'static str = args.params();
    let _flag: bool = args.params();
}

fn main() {}
