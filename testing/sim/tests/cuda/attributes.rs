//! Clusters of blocks and cooperative launches, as the driver is told of them.

use super::common::*;
use leasehold_conformance::TestKernel;
use leasehold_core::Error;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_cuda::driver::codes::code;
use leasehold_hal::{KernelCheck, KernelDesc, KernelSource, NodePatch, Op, OpList, Plan};
use leasehold_sim::{KernelBody, KernelSpec};

/// The launches that a function saw: the grid, the cluster, and cooperative or not.
type Seen = Arc<Mutex<Vec<([u32; 3], [u32; 3], bool)>>>;

/// A function that notes its launches, and its description.
fn noted(bench: &Bench) -> (Seen, KernelDesc<'static>) {
    const PTX: &str = ".version 9.0 .target sm_90 .entry noted() { ret; }";
    let seen = Seen::default();
    let notes = seen.clone();
    let body = KernelBody::run(move |launch| {
        notes.lock().push((launch.grid(), launch.cluster(), launch.is_cooperative()));
        Ok(())
    });
    bench.driver.machine().kernels().register("noted", KernelSpec::new(&[], 0, body));
    (seen, KernelDesc::new("noted", KernelSource::Ptx(PTX.into()), &[], KernelCheck::any()))
}

#[test]
fn launches_graphs_and_updates_have_their_kernels_attributes() {
    let bench = Bench::new(1);
    let device = bench.open(0);
    let a = stream(&device);
    let (seen, desc) = noted(&bench);
    let kinds = [
        desc.clone(),
        desc.clone().cluster([2, 1, 4]),
        desc.clone().cooperative(),
        desc.cluster([1, 2, 1]).cooperative(),
    ];
    for (desc, launches) in kinds.into_iter().zip([0, 1, 1, 1]) {
        let (cluster, cooperative) = (desc.cluster, desc.cooperative);
        let kernel = device.pipeline(&desc).unwrap();
        let grid = |grid| match dispatch(&kernel, &[], &[]) {
            Op::Dispatch(d) => Op::Dispatch(leasehold_hal::Dispatch { grid, ..d }),
            other => other,
        };
        let before = bench.calls("cuLaunchKernelEx");
        submit(&a, &[grid([2, 2, 4])]).unwrap();
        assert_eq!(bench.calls("cuLaunchKernelEx") - before, launches);
        let mut ops = OpList::new();
        ops.push(&grid([4, 2, 4]));
        // SAFETY: the plan's pipeline is this device's.
        let graph = unsafe { device.instantiate(Plan::new(ops)) }.unwrap();
        submit(&a, &[Op::Graph(&graph)]).unwrap();
        let patch = NodePatch { node: 0, bindings: None, params: None, grid: Some([2, 4, 8]) };
        // SAFETY: no launch is in flight.
        unsafe { graph.update(&[patch]) }.unwrap();
        let value = submit(&a, &[Op::Graph(&graph)]).unwrap();
        wait(&a, value).unwrap();
        let wanted = [[2, 2, 4], [4, 2, 4], [2, 4, 8]].map(|grid| (grid, cluster, cooperative));
        assert_eq!(std::mem::take(&mut *seen.lock()), wanted);
        drop((graph, kernel));
    }
    drop((a, device));
    bench.close();
}

#[test]
fn one_source_in_several_clusters_is_several_kernels() {
    let bench = Bench::new(1);
    let device = bench.open(0);
    let (_, desc) = noted(&bench);
    let pipeline = |desc: KernelDesc<'static>| device.pipeline(&desc).unwrap();
    let all = [[1; 3], [2, 1, 1], [4, 1, 1]].map(|of| pipeline(desc.clone().cluster(of)));
    assert_eq!([0, 1, 2].map(|i| all[i].cluster[0]), [1, 2, 4]);
    assert_eq!(all[0].native, all[1].native, "one function of the driver");
    assert!(pipeline(desc.clone().cluster([2, 1, 1])).same(&all[1]));
    // 132 or 16 multiprocessors run 32 blocks of 64 threads each.
    let blocks = |i: usize| device.resident_blocks(&all[i], 64, 0).unwrap();
    let units = u64::from(device.info().units);
    assert_eq!([0, 1, 2].map(blocks), [units * 32; 3]);
    assert_eq!(device.resident_blocks(&all[0], 1024, 100 << 10).unwrap(), units * 2);
    drop((all, device));
    bench.close();
}

#[test]
fn the_driver_refuses_launches_that_it_cannot_run() {
    let bench = Bench::new(2);
    let device = bench.open(0);
    let a = stream(&device);
    let (seen, desc) = noted(&bench);
    let units = device.info().units;
    for (desc, grid, refused) in [
        (desc.clone().cluster([2, 1, 1]), [3, 1, 1], code::INVALID_CLUSTER_SIZE),
        (desc.clone().cooperative(), [units * 32 + 1, 1, 1], code::COOPERATIVE_LAUNCH_TOO_LARGE),
    ] {
        let kernel = device.pipeline(&desc).unwrap();
        let op = match dispatch(&kernel, &[], &[]) {
            Op::Dispatch(d) => {
                Op::Dispatch(leasehold_hal::Dispatch { grid, block: [64, 1, 1], ..d })
            }
            other => other,
        };
        let why = submit(&a, &[op]).unwrap_err();
        assert!(matches!(why, Error::Driver { code, .. } if code == refused), "{why}");
    }
    // Clusters of 16 need a word with the driver, which the backend has.
    let kernel = device.pipeline(&desc.cluster([16, 1, 1])).unwrap();
    let op = match dispatch(&kernel, &[], &[]) {
        Op::Dispatch(d) => Op::Dispatch(leasehold_hal::Dispatch { grid: [16, 1, 1], ..d }),
        other => other,
    };
    let value = submit(&a, &[op]).unwrap();
    wait(&a, value).unwrap();
    assert_eq!(*seen.lock(), [([16, 1, 1], [16, 1, 1], false)]);
    drop((kernel, a, device));
    bench.close();
}

#[test]
fn a_device_without_clusters_or_cooperative_launch_refuses_their_kernels() {
    let mut config = driver_config(5);
    (config.compute_capability, config.cooperative_launch) = ((8, 9), false);
    let bench = Bench::with(config, inline());
    let device = bench.open(0);
    for (kernel, what) in [
        (TestKernel::Cluster, "(sm_89) has no clusters of blocks, which begin with"),
        (TestKernel::Together, "(sm_89) has no cooperative launch"),
    ] {
        let refused = device.pipeline(&kernel.for_cuda());
        assert!(
            matches!(&refused, Err(Error::Unsupported(why)) if why.contains(what)),
            "{refused:?}"
        );
    }
    drop(device);
    bench.close();
}
