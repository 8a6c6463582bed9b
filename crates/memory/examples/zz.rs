//! temporary
use leasehold_memory::workload::{Abi, Global};
fn main() {
    for _ in 0..50_000_000u64 {
        Global.enter_scope();
        unsafe { Global.register_struct(libc::malloc(64)) };
        Global.exit_scope();
    }
}
