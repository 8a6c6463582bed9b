//! Property tests of the pure parts against naive models.

mod conditionals;
mod hazards;
mod lists;

use crate::kernel::{Access, Binding, KernelCheck, KernelDesc, KernelSource, Pipeline};
use crate::{Backend, BackendKind, DeviceId, Limits, NullBackend};
use leasehold_core::{Handle, Lease, PoolConfig, Resource, Result, SlotPool, tags};
use std::borrow::Cow;
use std::sync::OnceLock;

struct Pipelines;

impl Resource for Pipelines {
    type Payload = Pipeline;
    type Request<'a> = ();
    const NAME: &'static str = "pipeline";
    fn create(&self, _: Handle<tags::Pipeline>, (): &()) -> Result<Pipeline> {
        let desc = KernelDesc::new("k", KernelSource::Ptx("".into()), &[], KernelCheck::any());
        let mut pipeline = Pipeline::new(&desc, 1, 1);
        pipeline.early_reads = EARLY;
        Ok(pipeline)
    }
}

/// The bindings that the kernel can read early: all but the second.
const EARLY: u32 = !2;

/// A pipeline of which tests read its early reads alone.
fn pipeline() -> Lease<Pipeline> {
    static POOL: OnceLock<SlotPool<Pipelines>> = OnceLock::new();
    POOL.get_or_init(|| SlotPool::new(Pipelines, PoolConfig::default()).unwrap())
        .acquire(&())
        .unwrap()
}

fn binding(addr: u64, len: u64, access: Access) -> Binding {
    Binding { addr, len, native: 0, access }
}

#[test]
fn device_ids_are_read_as_they_are_written_and_nothing_else_is() {
    let kinds = [
        BackendKind::Cpu,
        BackendKind::Cuda,
        BackendKind::Mps,
        BackendKind::Sim,
        BackendKind::Null,
    ];
    for kind in kinds {
        for ordinal in [0, 1, 7, u32::MAX] {
            let id = DeviceId::new(kind, ordinal);
            assert_eq!(id.to_string().parse::<DeviceId>().unwrap(), id);
        }
        assert_eq!(kind.name().parse::<DeviceId>().unwrap(), DeviceId::new(kind, 0));
    }
    for bad in [
        "",
        ":",
        ":0",
        "cpu:",
        "cpu:-1",
        "cpu:+1",
        "cpu: 1",
        "cpu:1 ",
        "cpu:0:0",
        "CPU:0",
        "cpu:4294967296",
        "cpu:1x",
        "gpu",
    ] {
        let e = bad.parse::<DeviceId>().unwrap_err();
        assert_eq!(e.kind(), "InvalidArgument", "{bad:?}");
        assert!(e.to_string().contains(&format!("{bad:?}")), "{e}");
    }
}

#[test]
fn a_kernel_takes_30_bindings_and_4096_bytes_and_no_more() {
    let desc = |bindings: usize, params: u32| KernelDesc {
        params,
        ..KernelDesc::new(
            "k",
            KernelSource::Registered(Cow::Borrowed("k")),
            &vec![Access::Read; bindings],
            KernelCheck::any(),
        )
    };
    desc(0, 0).validate().unwrap();
    desc(Limits::BINDINGS as usize, Limits::PARAMS).validate().unwrap();
    desc(2, 0).aligned(16).validate().unwrap();
    desc(0, 0).cluster([4, 2, 2]).cooperative().validate().unwrap();
    desc(2, 8).dependent_launch().reading_early(&[0, 1]).validate().unwrap();
    for bad in [
        desc(31, 0),
        desc(0, 4097),
        KernelDesc { name: Cow::Borrowed(""), ..desc(0, 0) },
        desc(0, 0).entry(""),
        desc(2, 0).aligned(3),
        desc(2, 0).aligned(0),
        desc(2, 0).reading_early(&[1]),
        desc(2, 0).dependent_launch().reading_early(&[2]),
        desc(2, 0).dependent_launch().reading_early(&[32]),
        desc(2, 6).dependent_launch().reading_early(&[1]),
        KernelDesc {
            bindings: vec![Access::Read, Access::ReadWrite].into(),
            ..desc(2, 0).dependent_launch().reading_early(&[1])
        },
        KernelDesc { alignment: vec![4, 4, 4].into(), ..desc(2, 0) },
        desc(0, 0).cluster([2, 0, 1]),
        desc(0, 0).cluster([4, 5, 1]),
        desc(0, 0).cluster([1 << 16, 1 << 16, 1]),
    ] {
        assert_eq!(bad.validate().unwrap_err().kind(), "InvalidArgument");
    }
}

#[test]
fn the_null_backend_has_nothing_and_says_so() {
    let null = NullBackend;
    assert_eq!(null.kind(), BackendKind::Null);
    assert!(null.devices().unwrap().is_empty());
    let e = null.open(DeviceId::new(BackendKind::Null, 3)).unwrap_err();
    assert_eq!(e.kind(), "Unavailable");
    assert!(e.to_string().contains("null:3"), "{e}");
    null.shutdown().unwrap();
    null.shutdown().unwrap();
    null.pools(&mut |name, _| panic!("the null backend has no pool {name}"));
}

/// A name with a static lifetime, since a kind's name is static. A list keeps it reachable for leak
/// detectors.
fn kept(name: String) -> &'static str {
    static KEPT: leasehold_core::sync::Mutex<Vec<&'static str>> =
        leasehold_core::sync::Mutex::new(Vec::new());
    let name = Box::leak(name.into_boxed_str());
    KEPT.lock().push(name);
    name
}

proptest::proptest! {
    /// Names of external backends may contain any characters, including colons and digits.
    #[test]
    fn device_ids_of_any_backend_are_read_as_they_are_written(
        names in proptest::collection::vec("[a-z0-9:]{0,6}|\\PC{0,4}", 1..4),
        which in 0..4usize,
        ordinal in proptest::prelude::any::<u32>(),
    ) {
        let mut kinds = vec![BackendKind::Cpu, BackendKind::Cuda];
        for name in names {
            if kinds.iter().all(|k| k.name() != name) {
                kinds.push(BackendKind::Other(kept(name)));
            }
        }
        let id = DeviceId::new(kinds[which % kinds.len()], ordinal);
        proptest::prop_assert_eq!(DeviceId::parse_among(&id.to_string(), &kinds).unwrap(), id);
    }
}
