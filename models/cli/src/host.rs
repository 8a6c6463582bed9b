//! Resources of the host that this process may still use: memory, by the machine, its control group
//! and its limit of addresses.
//!
//! This module must not know how commands use them.

use crate::failure::Failure;
use crate::table::bytes;
use leasehold::backend::Backend;
use leasehold::cpu::{CpuBackend, CpuConfig};

/// Bytes of memory that this process may still allocate: the remainder of the machine and of the
/// control group, at most the remainder of its address limit (`ulimit -v`).
pub fn available() -> Result<u64, Failure> {
    let backend = CpuBackend::with_config(CpuConfig::default())?;
    // If the amount is unknown, no request is refused.
    let known = backend.devices()?.into_iter().map(|d| d.memory).find(|m| m.total > 0);
    let free = known.map_or(u64::MAX, |m| m.free);
    Ok(free.min(addresses().unwrap_or(u64::MAX)))
}

/// Refuses to start if the address limit leaves less than `need`. If addresses run out later, the C
/// library or the standard library ends the process without a message of this command.
pub fn needs_addresses(what: &str, need: u64) -> Result<(), Failure> {
    match addresses() {
        Some(there) if there < need => {
            let (need, there) = (bytes(need), bytes(there));
            Err(Failure::new(format!(
                "{what} needs {need} of addresses, and the limit leaves {there}; raise it (ulimit -v)"
            )))
        }
        _ => Ok(()),
    }
}

/// Addresses that the limit leaves; `None` without a limit, or if it is unknown.
fn addresses() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|l| l.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let used = status.lines().find_map(|l| l.strip_prefix("VmSize:"))?;
    let used: u64 = used.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(used << 10))
}

/// Refuses a request that exceeds this process's memory.
///
/// `cure` tells the user the remedy.
pub fn needs(what: &str, need: u64, cure: &str) -> Result<(), Failure> {
    let there = available()?;
    if need <= there {
        return Ok(());
    }
    let (need, there) = (bytes(need), bytes(there));
    Err(Failure::new(format!(
        "{what} needs about {need} of host memory, and this process may take {there}; {cure}"
    )))
}

/// Standard output in its state at the start of the process.
pub mod output {
    use leasehold::backend::sync::atomic::{AtomicBool, Ordering};

    static CLOSED: AtomicBool = AtomicBool::new(false);

    /// Returns whether standard output was closed when the process started. Before `main`, the
    /// standard library replaces it by `/dev/null`, which accepts all output.
    pub fn closed() -> bool {
        CLOSED.load(Ordering::Relaxed)
    }

    /// Runs before the standard library starts.
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    extern "C" fn look() {
        // SAFETY: the call reads a flag of a descriptor, which need not be open.
        let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
        CLOSED.store(flags == -1, Ordering::Relaxed);
    }

    // SAFETY: the loader calls each function of this section once before `main`. `look` only calls
    // the C library and writes an atomic, both of which work at this time.
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    #[used]
    #[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
    #[cfg_attr(target_os = "macos", unsafe(link_section = "__DATA,__mod_init_func"))]
    static LOOK: extern "C" fn() = look;
}
