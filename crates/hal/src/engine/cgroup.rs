//! The limits of this process's control groups: processor time and memory, of versions 1 and 2.
//!
//! A limit holds for a group and everything below it. So this module reads all groups from the
//! process's own up to the mounted root, and the tightest limit counts. Inside a container, the
//! kernel may name a path outside of the mount; then the mounted root is read. A missing file means
//! no limit.
//!
//! This module must not know how the limits are used.

use std::fs;
use std::path::{Path, PathBuf};

/// Limits of the process's control groups.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CgroupLimits {
    /// Processor time, in processors; for example 1.5.
    pub cpus: Option<f64>,
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Bytes in use by the group with the tightest limit, without inactive file pages, which the
    /// kernel gives back at once.
    pub memory_used: Option<u64>,
}

/// Reads the limits of this process.
#[must_use]
pub fn limits() -> CgroupLimits {
    limits_under(Path::new("/"))
}

/// Reads the limits from a copy of `/proc/self/cgroup` and `/sys/fs/cgroup` under `root`.
#[must_use]
pub fn limits_under(root: &Path) -> CgroupLimits {
    let mut found = CgroupLimits::default();
    let Ok(list) = fs::read_to_string(root.join("proc/self/cgroup")) else { return found };
    let mount = root.join("sys/fs/cgroup");
    for line in list.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        if controllers.is_empty() {
            for base in [mount.clone(), mount.join("unified")] {
                for group in groups(&base, path) {
                    version_2(&group, &mut found);
                }
            }
            continue;
        }
        for controller in controllers.split(',') {
            let base =
                [mount.join(controllers), mount.join(controller)].into_iter().find(|b| b.is_dir());
            let Some(base) = base else { continue };
            for group in groups(&base, path) {
                match controller {
                    "cpu" => version_1_cpu(&group, &mut found),
                    "memory" => version_1_memory(&group, &mut found),
                    _ => {}
                }
            }
        }
    }
    found
}

/// The group and all groups above it that exist under the mount.
fn groups(base: &Path, path: &str) -> Vec<PathBuf> {
    let mut groups = vec![base.to_path_buf()];
    let mut at = base.to_path_buf();
    for part in path.split('/').filter(|p| !p.is_empty() && *p != "..") {
        at.push(part);
        if !at.is_dir() {
            break;
        }
        groups.push(at.clone());
    }
    groups
}

fn version_2(group: &Path, found: &mut CgroupLimits) {
    if let Ok(text) = fs::read_to_string(group.join("cpu.max")) {
        let mut words = text.split_whitespace();
        let quota = words.next().and_then(|w| w.parse::<f64>().ok());
        let period = words.next().and_then(|w| w.parse::<f64>().ok()).unwrap_or(100_000.0);
        note_cpus(quota, period, found);
    }
    note_memory(
        number(&group.join("memory.max")),
        number(&group.join("memory.current")),
        inactive_file(group, "inactive_file "),
        found,
    );
}

fn version_1_cpu(group: &Path, found: &mut CgroupLimits) {
    let read = |name: &str| {
        fs::read_to_string(group.join(name)).ok().and_then(|t| t.trim().parse::<f64>().ok())
    };
    note_cpus(read("cpu.cfs_quota_us"), read("cpu.cfs_period_us").unwrap_or(100_000.0), found);
}

fn version_1_memory(group: &Path, found: &mut CgroupLimits) {
    // In version 1, a number near 2^63 stands for no limit.
    let limit = number(&group.join("memory.limit_in_bytes")).filter(|&l| l < 1 << 60);
    let used = number(&group.join("memory.usage_in_bytes"));
    note_memory(limit, used, inactive_file(group, "total_inactive_file "), found);
}

fn note_cpus(quota: Option<f64>, period: f64, found: &mut CgroupLimits) {
    if let Some(quota) = quota
        && quota > 0.0
        && period > 0.0
    {
        let cpus = quota / period;
        found.cpus = Some(found.cpus.map_or(cpus, |c: f64| c.min(cpus)));
    }
}

fn note_memory(limit: Option<u64>, used: Option<u64>, inactive: u64, found: &mut CgroupLimits) {
    if let Some(limit) = limit
        && found.memory.is_none_or(|l| limit < l)
    {
        found.memory = Some(limit);
        found.memory_used = used.map(|u| u.saturating_sub(inactive));
    }
}

fn inactive_file(group: &Path, key: &str) -> u64 {
    fs::read_to_string(group.join("memory.stat"))
        .ok()
        .and_then(|t| {
            t.lines().find_map(|l| l.strip_prefix(key)).and_then(|v| v.trim().parse().ok())
        })
        .unwrap_or(0)
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
