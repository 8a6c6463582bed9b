//! Tensor maps in the arguments of a launch.

use super::common::*;
use leasehold_conformance::{BoxAt, TestKernel};
use leasehold_core::Error;
use leasehold_hal::{
    Access, KernelDesc, KernelSource, MapElement, NodePatch, Op, OpList, Plan, TensorMap,
};

/// The first 16 columns and 4 rows of a tensor of 32 columns and 8 rows.
fn params() -> BoxAt {
    let map = TensorMap::new(MapElement::U32, &[32, 8], &[16, 4]);
    BoxAt { map, at: [0, 0], size: [16, 4] }
}

#[test]
fn a_map_is_of_the_memory_that_its_binding_has() {
    let bench = Bench::new(3);
    let device = bench.open(0);
    let a = stream(&device);
    let kernel = device.pipeline(&TestKernel::Box.for_cuda()).unwrap();
    let [x, y] = [0; 2].map(|_| buffer(&device, &a, 1024));
    let out = buffer(&device, &a, 256);
    submit(&a, &[fill(&x, 1), fill(&y, 2)]).unwrap();
    let params = params();
    let params = bytemuck::bytes_of(&params);
    let from = |tensor: &_| [bind(tensor, Access::Read), bind(&out, Access::Write)];
    submit(&a, &[dispatch(&kernel, &from(&y), params)]).unwrap();
    assert_eq!(read(&a, &out), [2; 256]);
    let mut ops = OpList::new();
    ops.push(&dispatch(&kernel, &from(&x), params));
    // SAFETY: the plan's pipeline is this device's, and its memory outlives the launches.
    let graph = unsafe { device.instantiate(Plan::new(ops)) }.unwrap();
    submit(&a, &[Op::Graph(&graph)]).unwrap();
    assert_eq!(read(&a, &out), [1; 256]);
    let bindings = from(&y);
    let patch = NodePatch { node: 0, bindings: Some(&bindings), params: None, grid: None };
    // SAFETY: no launch is in flight, and the other buffer outlives the launches too.
    unsafe { graph.update(&[patch]) }.unwrap();
    submit(&a, &[Op::Graph(&graph)]).unwrap();
    assert_eq!(read(&a, &out), [2; 256]);
    assert_eq!(bench.reports(), [""; 0]);
    drop((graph, kernel, x, y, out, a, device));
    bench.close();
}

#[test]
fn the_parameters_begin_where_the_driver_aligns_a_map() {
    let bench = Bench::new(4);
    let device = bench.open(0);
    let refused = |desc: KernelDesc<'static>| match device.pipeline(&desc) {
        Ok(_) => panic!("a function whose parameters lie elsewhere"),
        Err(error) => error.to_string(),
    };
    let without = KernelDesc { maps: vec![].into(), ..TestKernel::Box.for_cuda() };
    let why = refused(without);
    assert!(why.contains("the parameters end at 192 and not at 160"), "{why}");
    let short = KernelDesc { params: 128, ..TestKernel::Box.for_cuda() };
    let why = refused(short);
    assert!(why.contains("the first is a map or aligned to 64"), "{why}");
    drop(device);
    bench.close();
}

#[test]
fn a_driver_that_tells_no_parameters_takes_no_tensor_maps() {
    let mut config = driver_config(5);
    config.param_info = false;
    let bench = Bench::with(config, inline());
    let device = bench.open(0);
    let refused = device.pipeline(&TestKernel::Box.for_cuda());
    assert!(
        matches!(&refused, Err(Error::Unsupported(why)) if why.contains("12.4")),
        "{refused:?}"
    );
    drop((refused, device));
    bench.close();
}

#[test]
fn a_device_without_tensor_maps_refuses_their_kernel() {
    let mut config = driver_config(5);
    config.compute_capability = (8, 9);
    let bench = Bench::with(config, inline());
    let device = bench.open(0);
    let refused = device.pipeline(&TestKernel::Box.for_cuda());
    assert!(
        matches!(&refused, Err(Error::Unsupported(why)) if why.contains("sm_89") && why.contains("9.0")),
        "{refused:?}"
    );
    drop(device.pipeline(&TestKernel::Fill.for_cuda()).unwrap());
    drop((refused, device));
    bench.close();
}

#[test]
fn the_emulator_runs_a_source_with_a_tensor_map() {
    let source = include_str!("../../../conformance/src/kernels/cuda/box.cu");
    // A registered function would take its place by its name.
    let source = source.replace("conformance_box", "emulated_box");
    let source = KernelSource::CudaC { source: source.into(), options: vec![].into() };
    let desc = KernelDesc { source, ..TestKernel::Box.for_cuda() }.entry("emulated_box");
    let bench = Bench::new(6);
    let device = bench.open(0);
    let a = stream(&device);
    let kernel = match device.pipeline(&desc) {
        Err(Error::Unavailable(_))
            if std::env::var_os("LEASEHOLD_NO_EMULATION").is_some()
                || std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_none() =>
        {
            return; // no g++
        }
        kernel => kernel.unwrap(),
    };
    let (x, out) = (buffer(&device, &a, 1024), buffer(&device, &a, 256));
    let params = BoxAt { at: [24, 6], ..params() };
    let bindings = [bind(&x, Access::Read), bind(&out, Access::Write)];
    submit(&a, &[fill(&x, 7), dispatch(&kernel, &bindings, bytemuck::bytes_of(&params))]).unwrap();
    for (i, byte) in read(&a, &out).into_iter().enumerate() {
        let (column, row) = (24 + i / 4 % 16, 6 + i / 64);
        assert_eq!(byte, if column < 32 && row < 8 { 7 } else { 0 }, "column {column}, row {row}");
    }
    assert_eq!(bench.reports(), [""; 0]);
    drop((kernel, x, out, a, device));
    bench.close();
}
