//! The machine's topology, and the share that this process may use: processors, caches, NUMA nodes,
//! pages.
//!
//! On Linux all data come from `/sys`, `/proc` and one system call (the affinity mask). A missing
//! file leaves a field empty; no function here fails. On other systems only the data of the
//! standard library and `sysctl` are filled in.
//!
//! This module must not know devices.

use super::isa;
use leasehold_hal::engine::{cgroup, host_memory};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// A kind of cache.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cache {
    /// The cache's level, from 1.
    pub level: u32,
    /// `Data`, `Instruction` or `Unified`.
    pub kind: String,
    /// Bytes of the cache.
    pub bytes: u64,
    /// Bytes of a cache line; 0 if unknown.
    pub line: u32,
    /// The number of processors that share one such cache.
    pub shared_by: u32,
    /// The number of such caches in the machine.
    pub count: u32,
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// The node's number.
    pub id: u32,
    /// The node's processors.
    pub cpus: Vec<u32>,
    /// Bytes of its memory.
    pub bytes: u64,
}

/// A machine.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct Topology {
    /// The processor's name as its vendor writes it.
    pub name: String,
    /// Architectures whose kernels run here, the most specific first.
    pub arch: Vec<String>,
    /// Instruction set extensions.
    pub features: Vec<String>,
    /// The number of online processors (hardware threads).
    pub online: u32,
    /// The number of online cores; equal to `online` without simultaneous multithreading.
    pub cores: u32,
    /// The number of packages (sockets).
    pub packages: u32,
    /// Processors that this process may run on.
    pub affinity: Vec<u32>,
    /// Processor time that control groups allow, in processors.
    pub quota: Option<f64>,
    /// The number of processors that this process can keep busy: its affinity, limited by its
    /// quota; at least 1.
    pub usable: u32,
    /// Caches, by level.
    pub caches: Vec<Cache>,
    /// NUMA nodes.
    pub nodes: Vec<NumaNode>,
    /// Bytes of a page.
    pub page: u64,
    /// Sizes of huge pages in bytes, ascending.
    pub huge_pages: Vec<u64>,
    /// The setting of transparent huge pages: `always`, `madvise`, `never`; empty if the system has
    /// none.
    pub transparent_huge_pages: String,
    /// Bytes of memory that this process can use.
    pub memory: u64,
}

impl Topology {
    /// Detects the topology of this machine.
    #[must_use]
    pub fn detect() -> Self {
        let features = isa::features();
        let mut t = Self::read(Path::new("/"), affinity());
        t.arch = isa::architectures(std::env::consts::ARCH, &features);
        t.features = features.iter().map(|&f| f.to_owned()).collect();
        t.page = host_memory::page_size();
        t.memory = host_memory::info().total;
        if t.name.is_empty() {
            t.name =
                system_name().unwrap_or_else(|| format!("{} processor", std::env::consts::ARCH));
        }
        t
    }

    /// Reads copies of `/proc` and `/sys` under `root`, for a process that may run on the
    /// processors of `affinity` (`None`: all). Fields from other sources (instruction set, page
    /// size, memory) stay empty.
    #[must_use]
    pub fn read(root: &Path, affinity: Option<Vec<u32>>) -> Self {
        let mut t = Self { name: model_name(root), ..Self::default() };
        let cpus = root.join("sys/devices/system/cpu");
        let online = read_list(&cpus.join("online"));
        let fallback =
            || (0..std::thread::available_parallelism().map_or(1, |n| n.get() as u32)).collect();
        let online =
            if online.is_empty() { affinity.clone().unwrap_or_else(fallback) } else { online };
        t.online = online.len() as u32;
        let mut cores = BTreeSet::new();
        let mut packages = BTreeSet::new();
        for &cpu in &online {
            let topology = cpus.join(format!("cpu{cpu}/topology"));
            let package = read_u64(&topology.join("physical_package_id")).unwrap_or(0);
            cores.insert((package, read_u64(&topology.join("core_id")).unwrap_or(u64::from(cpu))));
            packages.insert(package);
        }
        t.cores = cores.len() as u32;
        t.packages = packages.len() as u32;
        t.affinity = affinity.unwrap_or_else(|| online.clone());
        t.quota = cgroup::limits_under(root).cpus;
        let by_quota = t.quota.map_or(u32::MAX, |q| q as u32);
        t.usable = (t.affinity.len() as u32).min(by_quota).max(1);
        t.caches = caches(&cpus, &online);
        t.nodes = nodes(&root.join("sys/devices/system/node"));
        let huge = root.join("sys/kernel/mm");
        t.huge_pages = huge_pages(&huge.join("hugepages"));
        t.transparent_huge_pages = read(&huge.join("transparent_hugepage/enabled"))
            .and_then(|s| Some(s[s.find('[')? + 1..s.find(']')?].to_owned()))
            .unwrap_or_default();
        t
    }

    /// Labels and values of all fields, for the user.
    #[must_use]
    pub fn details(&self) -> Vec<(String, String)> {
        let mut d = vec![
            (
                "processors".into(),
                format!(
                    "{} online, {} cores, {} package{}",
                    self.online,
                    self.cores,
                    self.packages,
                    if self.packages == 1 { "" } else { "s" }
                ),
            ),
            ("usable".into(), format!("{} ({} by affinity)", self.usable, self.affinity.len())),
        ];
        if let Some(quota) = self.quota {
            d.push(("quota".into(), format!("{quota:.2} processors by control group")));
        }
        for c in &self.caches {
            d.push((
                format!("L{} {}", c.level, c.kind.to_lowercase()),
                format!(
                    "{} x {}, {} B lines, shared by {}",
                    c.count,
                    size(c.bytes),
                    c.line,
                    c.shared_by
                ),
            ));
        }
        for n in &self.nodes {
            d.push((
                format!("node {}", n.id),
                format!("{} processors, {}", n.cpus.len(), size(n.bytes)),
            ));
        }
        let huge: Vec<_> = self.huge_pages.iter().map(|&b| size(b)).collect();
        let thp = if self.transparent_huge_pages.is_empty() {
            "none"
        } else {
            &self.transparent_huge_pages
        };
        d.push((
            "pages".into(),
            format!("{}; huge {}; transparent {thp}", size(self.page), list(&huge)),
        ));
        d.push(("features".into(), list(&self.features)));
        d
    }
}

fn list(items: &[String]) -> String {
    if items.is_empty() { "none".into() } else { items.join(" ") }
}

fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 => format!("{:.1} GiB", b as f64 / (1u64 << 30) as f64),
        b if b >= 1 << 20 => {
            format!("{:.4} MiB", b as f64 / (1u64 << 20) as f64).replace(".0000", "")
        }
        b if b >= 1 << 10 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

/// Parses the kernel's lists: `0-3,8,10-11`. A text that is not a list gives an empty list.
#[must_use]
pub fn parse_list(text: &str) -> Vec<u32> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        match (from.trim().parse::<u32>(), to.trim().parse::<u32>()) {
            // No machine has more processors than this. A broken file must not fill the memory.
            (Ok(from), Ok(to)) if from <= to && to < 1 << 20 => cpus.extend(from..=to),
            _ => return Vec::new(),
        }
    }
    cpus
}

/// Parses sizes in the format of `/sys`: `48K`, `2M`, `64`.
#[must_use]
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn read_u64(path: &Path) -> Option<u64> {
    read(path)?.trim().parse().ok()
}

fn read_list(path: &Path) -> Vec<u32> {
    read(path).map(|t| parse_list(&t)).unwrap_or_default()
}

fn model_name(root: &Path) -> String {
    let info = read(&root.join("proc/cpuinfo")).unwrap_or_default();
    let field = |key: &str| {
        info.lines()
            .find_map(|l| l.split_once(':').filter(|(k, _)| k.trim() == key))
            .map(|(_, v)| v.trim().to_owned())
            .filter(|v| !v.is_empty())
    };
    field("model name")
        .or_else(|| field("Model"))
        .or_else(|| field("cpu model"))
        .unwrap_or_default()
}

fn caches(cpus: &Path, online: &[u32]) -> Vec<Cache> {
    let mut found: Vec<(Cache, BTreeSet<Vec<u32>>)> = Vec::new();
    for &cpu in online {
        for index in 0..8 {
            let dir = cpus.join(format!("cpu{cpu}/cache/index{index}"));
            let Some(level) = read_u64(&dir.join("level")) else { break };
            let shared = read_list(&dir.join("shared_cpu_list"));
            let cache = Cache {
                level: level as u32,
                kind: read(&dir.join("type")).unwrap_or_default().trim().to_owned(),
                bytes: read(&dir.join("size")).and_then(|s| parse_size(&s)).unwrap_or(0),
                line: read_u64(&dir.join("coherency_line_size")).unwrap_or(0) as u32,
                shared_by: shared.len().max(1) as u32,
                count: 0,
            };
            let shared = if shared.is_empty() { vec![cpu] } else { shared };
            match found.iter_mut().find(|f| f.0 == cache) {
                Some(f) => drop(f.1.insert(shared)),
                None => found.push((cache, BTreeSet::from([shared]))),
            }
        }
    }
    let mut caches: Vec<_> =
        found.into_iter().map(|(c, s)| Cache { count: s.len() as u32, ..c }).collect();
    caches.sort();
    caches
}

fn nodes(dir: &Path) -> Vec<NumaNode> {
    let mut nodes: Vec<_> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| {
            let id = e.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let info = read(&e.path().join("meminfo")).unwrap_or_default();
            let total = info.lines().find_map(|l| l.split_once("MemTotal:"));
            Some(NumaNode {
                id,
                cpus: read_list(&e.path().join("cpulist")),
                bytes: total.and_then(|t| host_memory::parse_kib(t.1)).unwrap_or(0),
            })
        })
        .collect();
    nodes.sort_by_key(|n| n.id);
    nodes
}

fn huge_pages(dir: &Path) -> Vec<u64> {
    let mut sizes: Vec<u64> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| {
            e.file_name().to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()
        })
        .map(|kib: u64| kib << 10)
        .collect();
    sizes.sort_unstable();
    sizes
}

/// The processors that this process may run on; `None` if the system does not report them.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn affinity() -> Option<Vec<u32>> {
    // Machines with more than 1,024 processors need a larger mask: the kernel refuses a small one.
    let mut words = 1024 / 64;
    while words <= (1 << 20) / 64 {
        let mut mask = vec![0u64; words];
        // SAFETY: the mask is as long as the length says, and the kernel writes at most that much.
        // The set type only wraps words.
        let rc = unsafe {
            libc::sched_getaffinity(0, words * 8, mask.as_mut_ptr().cast::<libc::cpu_set_t>())
        };
        if rc == 0 {
            let bit = |i: &u32| mask[*i as usize / 64] >> (i % 64) & 1 == 1;
            return Some((0..words as u32 * 64).filter(bit).collect());
        }
        words *= 4;
    }
    None
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn affinity() -> Option<Vec<u32>> {
    None
}

/// The processor's name on systems without `/proc`.
#[cfg(target_vendor = "apple")]
fn system_name() -> Option<String> {
    let mut text = [0u8; 256];
    let mut len = text.len();
    // SAFETY: a terminated name, and a buffer with its length. The kernel writes at most that much.
    let rc = unsafe {
        libc::sysctlbyname(
            c"machdep.cpu.brand_string".as_ptr(),
            text.as_mut_ptr().cast(),
            &raw mut len,
            std::ptr::null_mut(),
            0,
        )
    };
    let text = text.get(..len.checked_sub(1)?)?;
    (rc == 0).then(|| String::from_utf8_lossy(text).into_owned())
}

#[cfg(not(target_vendor = "apple"))]
fn system_name() -> Option<String> {
    None
}
