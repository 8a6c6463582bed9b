//! What of the host this process may still use: memory, by the machine, its control group and its
//! limit of addresses.
//!
//! This module must not know what commands do with it.

use crate::failure::Failure;
use crate::table::bytes;
use leasehold::backend::Backend;
use leasehold::cpu::{CpuBackend, CpuConfig};

/// Bytes of memory that this process may still take: what the machine and the control group have
/// left, and no more than its limit of addresses (`ulimit -v`) leaves.
pub(crate) fn available() -> Result<u64, Failure> {
    let backend = CpuBackend::with_config(CpuConfig::default())?;
    // Where nobody says how much there is, nothing is refused for it.
    let known = backend.devices()?.into_iter().map(|d| d.memory).find(|m| m.total > 0);
    let free = known.map_or(u64::MAX, |m| m.free);
    Ok(free.min(addresses().unwrap_or(u64::MAX)))
}

/// Refuses to begin where the limit of addresses leaves less than `need`: what runs out of them in
/// the middle of everything is ended by the C library or the standard one, without a word of ours.
pub(crate) fn needs_addresses(what: &str, need: u64) -> Result<(), Failure> {
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

/// Addresses that the limit leaves; `None` without a limit, or where nobody says.
fn addresses() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|l| l.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let used = status.lines().find_map(|l| l.strip_prefix("VmSize:"))?;
    let used: u64 = used.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(used << 10))
}

/// Refuses what needs more than this process may take.
///
/// `cure` says what the user can do.
pub(crate) fn needs(what: &str, need: u64, cure: &str) -> Result<(), Failure> {
    let there = available()?;
    if need <= there {
        return Ok(());
    }
    let (need, there) = (bytes(need), bytes(there));
    Err(Failure::new(format!("{what} needs about {need} of host memory, and this process may take {there}; {cure}")))
}

/// Standard output, as the process was given it.
pub(crate) mod output {
    use leasehold_core::sync::atomic::{AtomicBool, Ordering};

    static CLOSED: AtomicBool = AtomicBool::new(false);

    /// Whether standard output was closed when the process began. By the time of `main` the
    /// standard library has put `/dev/null` in its place, which takes everything.
    pub(crate) fn closed() -> bool {
        CLOSED.load(Ordering::Relaxed)
    }

    /// Runs before the standard library begins.
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    extern "C" fn look() {
        // SAFETY: asks for a flag of a descriptor, which need not be open.
        let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
        CLOSED.store(flags == -1, Ordering::Relaxed);
    }

    // SAFETY: the loader calls each function of this section once before `main`, with nothing that
    // `look` needs missing: it calls the C library and writes an atomic.
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    #[used]
    #[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
    #[cfg_attr(target_os = "macos", unsafe(link_section = "__DATA,__mod_init_func"))]
    static LOOK: extern "C" fn() = look;
}
