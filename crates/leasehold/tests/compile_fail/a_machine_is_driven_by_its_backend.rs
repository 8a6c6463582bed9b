//! Freeing pinned memory behind the backend's back, and saying that its work is over.
#![forbid(unsafe_code)]
use leasehold::Runtime;
use leasehold_sim::cuda::SimDriver;
use leasehold_sim::{Monitor, SimBackend};

fn uploads_to_nowhere(backend: &SimBackend, runtime: &Runtime) -> leasehold::Result<()> {
    let pinned = runtime.alloc_pinned(1 << 20)?;
    // The segment is gone, the next staged upload writes there.
    backend.machine().host_free(pinned.addr() & !0x1f_ffff)
}

fn completes_too_early(driver: &SimDriver, word: u64) -> leasehold::Result<()> {
    driver.machine().host_store(word, u64::MAX)
}

fn all_of_it(machine: &Monitor) -> leasehold_sim::Machine {
    machine.drive()
}

fn main() {}
