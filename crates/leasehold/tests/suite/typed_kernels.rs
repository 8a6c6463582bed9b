//! Kernels whose types say what a launch takes.

use crate::common::*;
use leasehold::kernel::{CpuArgs, Kernel, KernelSource, Read, ReadWrite, Write};
use leasehold::{Error, KernelBase, bytemuck};

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Line {
    slope: f64,
    from: u64,
}

type Lines = Kernel<(Read<u8>, ReadWrite<f64>, Write<u16>), Line>;

/// `y[i] += slope * x[i] + from`, and the number of each place.
unsafe fn run_lines(args: &CpuArgs<'_>) {
    let (Line { slope, from }, i) = (args.params(), args.tile()[0] as usize);
    // SAFETY: 0 is only read; each tile writes one value of its own of 1 and of 2.
    let (x, y, place) = unsafe {
        (args.slice::<u8>(0), args.slice_mut::<f64>(1, i, 1), args.slice_mut::<u16>(2, i, 1))
    };
    y[0] += slope * f64::from(x[i]) + from as f64;
    place[0] = i as u16;
}

fn lines() -> Lines {
    let check = Lines::check(|launch| match launch.info.grid {
        [tiles, 1, 1] if launch.params.slope.is_finite() => {
            (0..3).try_for_each(|i| launch.want(i, tiles.into()))
        }
        _ => Err(Error::invalid("a grid of one dimension, and a slope")),
    });
    // SAFETY: it touches its bindings through slices, which check bounds. Each tile writes its own
    // values.
    unsafe { Lines::new("lines", KernelSource::Cpu(run_lines), check) }.unwrap()
}

#[test]
fn a_typed_launch_has_its_signatures_order_types_and_parameters() {
    let runtime = runtime();
    let lines = lines();
    let x = runtime.upload(&[1u8, 2, 3, 4]).unwrap();
    let y = runtime.upload(&[0.5f64; 4]).unwrap();
    let place = runtime.upload(&[9u16; 5]).unwrap();
    let line = Line { slope: 2.0, from: 10 };
    lines.launch(runtime.stream(), (&x, &y, &place), &line, 3).unwrap();
    let part = (x.slice(3..), y.slice(3..), place.slice(4..));
    lines.launch(runtime.stream(), part, &line, 1).unwrap();
    assert_eq!(runtime.to_vec(&y).unwrap(), [12.5, 14.5, 16.5, 18.5]);
    assert_eq!(runtime.to_vec(&place).unwrap(), [0, 1, 2, 9, 0]);

    let refused = |line: Line, tiles: u32| {
        let launch = lines.launch(runtime.stream(), (&x, &y, &place), &line, tiles);
        launch.unwrap_err().to_string()
    };
    let beyond = refused(line, 5);
    assert!(beyond.contains("binding 0 has 4 bytes, and the launch needs 5"), "{beyond}");
    let no_slope = refused(Line { slope: f64::NAN, from: 0 }, 1);
    assert!(no_slope.contains("kernel lines: a grid of one dimension, and a slope"), "{no_slope}");
}

#[test]
fn lengths_count_values_and_no_binding_is_too_long_to_be_counted() {
    let runtime = runtime();
    let (seen, told) = std::sync::mpsc::channel();
    let check = Lines::check(move |launch| {
        seen.send((0..4).map(|i| launch.len(i)).collect::<Vec<_>>()).unwrap();
        assert!(launch.want(1, u64::MAX).is_err() && launch.want(3, 0).is_err());
        Ok(())
    });
    // SAFETY: as above.
    let lines = unsafe { Lines::new("lines", KernelSource::Cpu(run_lines), check) }.unwrap();
    let x = runtime.upload(&[1u8, 2, 3]).unwrap();
    let y = runtime.upload(&[0.5f64; 2]).unwrap();
    let place = runtime.upload(&[9u16; 5]).unwrap();
    let line = Line { slope: 2.0, from: 10 };
    lines.launch(runtime.stream(), (&x, &y, &place), &line, 1).unwrap();
    assert_eq!(told.recv().unwrap(), [3, 2, 5, 0]);
}

#[test]
fn a_view_that_is_not_aligned_to_its_values_is_refused() {
    let runtime = runtime();
    let bytes = runtime.upload(&[0u8; 64]).unwrap();
    let (x, place) = (runtime.upload(&[1u8]).unwrap(), runtime.upload(&[9u16]).unwrap());
    let odd = leasehold::View::part(&bytes, 4..12).unwrap().values::<f64>().unwrap();
    let line = Line { slope: 2.0, from: 10 };
    let refused = lines().launch(runtime.stream(), (&x, odd, &place), &line, 1).unwrap_err();
    assert!(refused.to_string().contains("not aligned to 8 bytes"), "{refused}");
}

#[test]
fn a_base_of_another_signature_is_refused_with_both() {
    let axpy = |base: KernelBase| Kernel::<(Read<f32>, ReadWrite<f32>), f32>::try_from(base);
    let axpy = axpy(crate::common::axpy()).unwrap();
    let runtime = runtime();
    let (x, y) = (runtime.upload(&[1.0f32; 4]).unwrap(), runtime.upload(&[0.5f32; 4]).unwrap());
    axpy.launch(runtime.stream(), (&x, &y), &2.0, 1).unwrap();
    assert_eq!(runtime.to_vec(&y).unwrap(), [2.5; 4]);

    let other = Kernel::<(Read<f32>, Write<f32>), f32>::try_from(axpy.base().clone()).unwrap_err();
    let said = "kernel axpy: it declares [Read, ReadWrite] and 4 bytes of parameters, and its type [Read, Write] and 4";
    assert!(other.to_string().contains(said), "{other}");
    let params = Kernel::<(Read<f32>, ReadWrite<f32>), f64>::try_from(axpy.base().clone());
    assert!(params.unwrap_err().to_string().contains("and its type [Read, ReadWrite] and 8"));
}
