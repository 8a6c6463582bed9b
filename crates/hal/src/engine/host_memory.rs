//! The host's memory: its amount, as far as this process may use it, and the size of a page.
//!
//! This module must not know how the memory is used.

use crate::MemoryInfo;
use crate::engine::cgroup;

/// Bytes of a page.
#[must_use]
pub fn page_size() -> u64 {
    // SAFETY: the call reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).ok().filter(|s| s.is_power_of_two()).unwrap_or(4096)
}

/// The memory that this process can use: the machine's memory, limited by its control groups.
#[must_use]
pub fn info() -> MemoryInfo {
    let mut info = system();
    let group = cgroup::limits();
    if let Some(limit) = group.memory
        && limit < info.total
    {
        info.total = limit;
        info.free = info.free.min(limit.saturating_sub(group.memory_used.unwrap_or(0)));
    }
    info
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn system() -> MemoryInfo {
    parse_meminfo(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn system() -> MemoryInfo {
    let page = page_size();
    // SAFETY: the call reads a constant of the system.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    let total = u64::try_from(pages).unwrap_or(0).saturating_mul(page);
    MemoryInfo { total, free: total }
}

/// Parses `/proc/meminfo`: the total memory, and the memory that is available without swapping.
#[must_use]
pub fn parse_meminfo(text: &str) -> MemoryInfo {
    let field = |key: &str| text.lines().find_map(|l| l.strip_prefix(key)).and_then(parse_kib);
    let free = field("MemAvailable:").or_else(|| field("MemFree:")).unwrap_or(0);
    MemoryInfo { total: field("MemTotal:").unwrap_or(0), free }
}

/// The bytes of a field such as `  1234 kB`.
#[must_use]
pub fn parse_kib(text: &str) -> Option<u64> {
    text.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}
