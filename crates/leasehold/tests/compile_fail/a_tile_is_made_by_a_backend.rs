//! Bytes of one's own would become parameters of any type, and addresses of one's own bindings.
#![forbid(unsafe_code)]

use leasehold::kernel::CpuArgs;

fn main() {
    let params = 0xdead_beef_0000u64.to_le_bytes();
    let no_scratch = (std::ptr::null_mut(), 0);
    let args = CpuArgs::new(([1; 3], [1; 3]), &[], &params, no_scratch);
    println!("{}", args.params::<u64>());
    let forged = CpuArgs { params: &params, ..args };
    println!("{}", forged.params::<u64>());
}
