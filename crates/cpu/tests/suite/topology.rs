//! Topology and control groups, on invented machines.

use leasehold_cpu::driver::isa::architectures;
use leasehold_cpu::driver::topology::{Cache, Topology, parse_list, parse_size};
use leasehold_hal::engine::cgroup::limits_under;
use leasehold_hal::engine::host_memory::parse_meminfo;
use std::fs;
use std::path::Path;

/// Writes files (`path: text`) under a new directory.
fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (path, text) in files {
        put(dir.path(), path, text);
    }
    dir
}

fn put(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

#[test]
fn lists_and_sizes() {
    assert_eq!(parse_list("0-2,8,10-11\n"), [0, 1, 2, 8, 10, 11]);
    assert_eq!(parse_list("\n"), [0u32; 0]);
    for broken in ["3-1", "a", "0-4294967295", "1-", "-"] {
        assert_eq!(parse_list(broken), [0u32; 0], "{broken}");
    }
    assert_eq!(parse_size("48K\n"), Some(48 << 10));
    assert_eq!(parse_size("2M"), Some(2 << 20));
    assert_eq!(parse_size("1G"), Some(1 << 30));
    assert_eq!(parse_size("64"), Some(64));
    assert_eq!(parse_size(""), None);
    assert_eq!(parse_size("K"), None);
    let info = parse_meminfo("MemTotal:       16 kB\nMemFree: 3 kB\nMemAvailable:    8 kB\n");
    assert_eq!((info.total, info.free), (16 << 10, 8 << 10));
    assert_eq!(parse_meminfo("").total, 0);
}

#[test]
fn a_server_with_two_nodes_and_threads() {
    let dir = machine(&[
        (
            "proc/cpuinfo",
            "processor\t: 0\nmodel name\t: Great Processor 9000\n\nprocessor\t: 1\nmodel name\t: Great\n",
        ),
        ("sys/devices/system/cpu/online", "0-7\n"),
        ("sys/devices/system/node/node0/cpulist", "0-1,4-5\n"),
        (
            "sys/devices/system/node/node0/meminfo",
            "Node 0 MemTotal:       1024 kB\nNode 0 MemFree: 1 kB\n",
        ),
        ("sys/devices/system/node/node1/cpulist", "2-3,6-7\n"),
        ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       2048 kB\n"),
        ("sys/devices/system/node/possible", "0-1\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
        ("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0\n"),
    ]);
    for cpu in 0..8 {
        let at = |p: &str| format!("sys/devices/system/cpu/cpu{cpu}/{p}");
        put(dir.path(), &at("topology/physical_package_id"), if cpu % 4 < 2 { "0" } else { "1" });
        put(dir.path(), &at("topology/core_id"), &format!("{}", cpu % 2));
        put(dir.path(), &at("cache/index0/level"), "1");
        put(dir.path(), &at("cache/index0/type"), "Data");
        put(dir.path(), &at("cache/index0/size"), "48K");
        put(dir.path(), &at("cache/index0/coherency_line_size"), "64");
        put(
            dir.path(),
            &at("cache/index0/shared_cpu_list"),
            &format!("{},{}", cpu % 4, cpu % 4 + 4),
        );
        put(dir.path(), &at("cache/index1/level"), "3");
        put(dir.path(), &at("cache/index1/type"), "Unified");
        put(dir.path(), &at("cache/index1/size"), "32M");
        let node = if cpu % 4 < 2 { "0-1,4-5" } else { "2-3,6-7" };
        put(dir.path(), &at("cache/index1/shared_cpu_list"), node);
    }
    let t = Topology::read(dir.path(), Some(vec![0, 1, 2, 3, 4, 5]));
    assert_eq!(t.name, "Great Processor 9000");
    assert_eq!((t.online, t.cores, t.packages, t.usable), (8, 4, 2, 6));
    let l1 =
        Cache { level: 1, kind: "Data".into(), bytes: 48 << 10, line: 64, shared_by: 2, count: 4 };
    let l3 = Cache {
        level: 3,
        kind: "Unified".into(),
        bytes: 32 << 20,
        line: 0,
        shared_by: 4,
        count: 2,
    };
    assert_eq!(t.caches, [l1, l3]);
    assert_eq!(
        t.nodes.iter().map(|n| (n.id, n.cpus.len(), n.bytes)).collect::<Vec<_>>(),
        [(0, 4, 1 << 20), (1, 4, 2 << 20)]
    );
    assert_eq!(t.huge_pages, [2 << 20, 1 << 30]);
    assert_eq!(t.transparent_huge_pages, "madvise");
    let text = format!("{:?}", t.details());
    assert!(
        text.contains("4 cores") && text.contains("32 MiB") && text.contains("6 (6 by affinity)"),
        "{text}"
    );
}

#[test]
fn a_machine_that_tells_nothing() {
    let dir = machine(&[]);
    let t = Topology::read(dir.path(), Some(vec![0, 3]));
    assert_eq!((t.online, t.cores, t.packages, t.usable), (2, 2, 1, 2));
    assert!(t.caches.is_empty() && t.nodes.is_empty() && t.name.is_empty());
    assert!(Topology::read(dir.path(), None).usable >= 1);
    let garbage = machine(&[
        ("proc/cpuinfo", "\u{0}:::\n:\n"),
        ("proc/self/cgroup", "nonsense\n0:\n::\n0::/../../x\n"),
        ("sys/devices/system/cpu/online", "lots"),
        ("sys/devices/system/cpu/cpu0/cache/index0/level", "x"),
        ("sys/devices/system/node/nodeX/cpulist", "0"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always"),
        ("sys/kernel/mm/hugepages/hugepages-xkB/a", ""),
    ]);
    let t = Topology::read(garbage.path(), Some(vec![5]));
    assert_eq!((t.online, t.usable), (1, 1));
    assert!(t.huge_pages.is_empty() && t.nodes.is_empty());
}

#[test]
fn control_groups_of_version_2() {
    let dir = machine(&[
        ("proc/self/cgroup", "0::/jobs/one\n"),
        ("sys/fs/cgroup/cgroup.controllers", "cpu memory\n"),
        ("sys/fs/cgroup/jobs/cpu.max", "150000 100000\n"),
        ("sys/fs/cgroup/jobs/memory.max", "max\n"),
        ("sys/fs/cgroup/jobs/one/cpu.max", "max 100000\n"),
        ("sys/fs/cgroup/jobs/one/memory.max", "1048576\n"),
        ("sys/fs/cgroup/jobs/one/memory.current", "4096\n"),
        ("sys/fs/cgroup/jobs/one/memory.stat", "anon 1\ninactive_file 1024\n"),
        ("sys/devices/system/cpu/online", "0-7\n"),
    ]);
    let l = limits_under(dir.path());
    assert_eq!((l.cpus, l.memory, l.memory_used), (Some(1.5), Some(1 << 20), Some(3072)));
    assert_eq!(
        Topology::read(dir.path(), None).usable,
        1,
        "one and a half processors keep one thread busy"
    );
    put(dir.path(), "sys/fs/cgroup/jobs/cpu.max", "350000 100000\n");
    assert_eq!(Topology::read(dir.path(), None).usable, 3);
    put(dir.path(), "sys/fs/cgroup/jobs/cpu.max", "5000 100000\n");
    assert_eq!(Topology::read(dir.path(), None).usable, 1, "never none");
    // Inside a container the path lies outside of the mount.
    put(dir.path(), "proc/self/cgroup", "0::/not/here\n");
    put(dir.path(), "sys/fs/cgroup/cpu.max", "200000 100000\n");
    assert_eq!(limits_under(dir.path()).cpus, Some(2.0));
}

#[test]
fn control_groups_of_version_1() {
    let dir = machine(&[
        (
            "proc/self/cgroup",
            "9:name=systemd:/\n4:memory:/a/b\n3:cpuset:/\n2:cpu,cpuacct:/a\n0::/\n",
        ),
        ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
        ("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "250000\n"),
        ("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "50000\n"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "8192\n"),
        ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "4096\n"),
        ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "16384\n"),
    ]);
    let l = limits_under(dir.path());
    assert_eq!((l.cpus, l.memory, l.memory_used), (Some(5.0), Some(8192), Some(4096)));
    assert_eq!(limits_under(machine(&[]).path()), Default::default());
}

#[test]
fn architectures_from_the_most_specific() {
    let v3 = ["sse4.2", "ssse3", "popcnt", "avx2", "fma", "f16c", "bmi1", "bmi2", "lzcnt", "movbe"];
    let v4 = ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"];
    let all: Vec<&str> = v3.iter().chain(&v4).copied().collect();
    assert_eq!(
        architectures("x86_64", &all),
        ["cpu/x86-64-v4", "cpu/x86-64-v3", "cpu/x86-64-v2", "cpu/x86-64", "cpu"]
    );
    let with = |more: &[&'static str]| [&all[..], more].concat();
    let bf16 = architectures("x86_64", &with(&["avx512bf16"]));
    assert_eq!(bf16[..2], ["cpu/x86-64-v4-bf16", "cpu/x86-64-v4"]);
    let tiles = architectures("x86_64", &with(&["avx512bf16", "amx-tile", "amx-bf16"]));
    assert_eq!(tiles[..3], ["cpu/x86-64-v4-amx", "cpu/x86-64-v4-bf16", "cpu/x86-64-v4"]);
    let tiles_alone = architectures("x86_64", &with(&["amx-tile", "amx-bf16"]));
    assert_eq!(tiles_alone[0], "cpu/x86-64-v4", "a level holds all below it");
    assert_eq!(
        architectures("x86_64", &v3),
        ["cpu/x86-64-v3", "cpu/x86-64-v2", "cpu/x86-64", "cpu"]
    );
    assert_eq!(architectures("x86_64", &v4), ["cpu/x86-64", "cpu"], "a level holds all below it");
    assert_eq!(architectures("aarch64", &["neon"]), ["cpu/aarch64-neon", "cpu/aarch64", "cpu"]);
}

#[test]
fn this_machine_can_be_described() {
    let t = Topology::detect();
    assert!(t.usable >= 1 && t.page >= 4096 && t.memory > 0 && !t.name.is_empty());
    assert!(t.usable as usize <= t.affinity.len());
    assert_eq!(t.arch.last().map(String::as_str), Some("cpu"));
}
