//! Every call, type and reduction, beside a sequential model.

use crate::common::{Rank, ranks};
use half::{bf16, f16};
use leasehold::{Array, Result, Stream, View};
use leasehold_collective::{Element, Reduce};
use std::fmt::Debug;

/// A type whose reductions the model knows.
trait Value: Element + PartialEq + Debug {
    /// The number of this type for some integer.
    fn of(x: i64) -> Self;
    fn reduced(how: Reduce, all: &[Self]) -> Self;
}

macro_rules! integers {
    ($($rust:ty)*) => {
        $(impl Value for $rust {
            fn of(x: i64) -> Self {
                x as $rust
            }

            fn reduced(how: Reduce, all: &[Self]) -> Self {
                let wide = all.iter().map(|&x| i128::from(x));
                (match how {
                    Reduce::Sum => wide.fold(0i128, i128::wrapping_add),
                    Reduce::Product => wide.fold(1i128, i128::wrapping_mul),
                    Reduce::Least => wide.min().unwrap(),
                    Reduce::Largest => wide.max().unwrap(),
                    Reduce::Average => panic!("refused"),
                }) as $rust
            }
        })*
    };
}
integers! { i8 u8 i16 u16 i32 u32 i64 u64 }

macro_rules! floats {
    ($($rust:ty: $from:expr, $to:expr;)*) => {
        $(impl Value for $rust {
            fn of(x: i64) -> Self {
                $from(x as f64)
            }

            // The numbers are small integers, whose sums and products are exact.
            fn reduced(how: Reduce, all: &[Self]) -> Self {
                let wide = all.iter().map(|&x| $to(x));
                $from(match how {
                    Reduce::Sum => wide.sum(),
                    Reduce::Product => wide.product(),
                    Reduce::Least => wide.fold(f64::INFINITY, f64::min),
                    Reduce::Largest => wide.fold(f64::NEG_INFINITY, f64::max),
                    Reduce::Average => wide.sum::<f64>() / all.len() as f64,
                })
            }
        })*
    };
}
floats! {
    f16: f16::from_f64, f16::to_f64;
    bf16: bf16::from_f64, bf16::to_f64;
    f32: |x| x as f32, f64::from;
    f64: |x| x, |x| x;
}

/// A rank's elements.
fn values<T: Value>(rank: u32, len: usize) -> Vec<T> {
    (0..len).map(|i| T::of((i64::from(rank) * 5 + i as i64 * 3) % 7 - 3)).collect()
}

/// The result of all ranks' elements.
fn reduced<T: Value>(how: Reduce, size: u32, len: usize) -> Vec<T> {
    let all: Vec<Vec<T>> = (0..size).map(|rank| values(rank, len)).collect();
    (0..len).map(|i| T::reduced(how, &all.iter().map(|x| x[i]).collect::<Vec<_>>())).collect()
}

/// Memory and what it must have in the end.
type Expected<T> = Vec<(String, Array<T>, Vec<T>)>;

/// Makes every call with elements of a type.
fn calls<T: Value>(r: &Rank, stream: &Stream) -> Result<Expected<T>> {
    let (me, size) = (r.me(), r.world.size());
    let (own, n) = (me as usize, size as usize);
    let mut all: Expected<T> = Vec::new();
    // More than is reduced at a time.
    let (long, part) = (1500, 7);
    for how in Reduce::ALL.into_iter().filter(|how| how.check(T::TYPE).is_ok()) {
        let x = r.runtime.upload(&values::<T>(me, long))?;
        r.comm.all_reduce(stream, &x, how)?;
        all.push((format!("all_reduce {how}"), x, reduced(how, size, long)));

        let (x, y) = (r.runtime.upload(&values::<T>(me, long))?, r.runtime.zeros::<T>(long)?);
        r.comm.all_reduce_into(stream, &y, &x, how)?;
        all.push((format!("all_reduce_into {how}"), y, reduced(how, size, long)));
        all.push((format!("source of all_reduce_into {how}"), x, values(me, long)));

        let x = r.runtime.upload(&values::<T>(me, part * n))?;
        let y = r.runtime.zeros::<T>(part)?;
        r.comm.reduce_scatter(stream, &y, &x, how)?;
        let whole = reduced::<T>(how, size, part * n);
        let mine = whole[own * part..][..part].to_vec();
        all.push((format!("reduce_scatter {how}"), y, mine.clone()));

        // In place.
        let x = r.runtime.upload(&values::<T>(me, part * n))?;
        r.comm.reduce_scatter(stream, x.slice(own * part..(own + 1) * part), &x, how)?;
        let mut want = values::<T>(me, part * n);
        want[own * part..][..part].copy_from_slice(&mine);
        all.push((format!("reduce_scatter {how} in place"), x, want));

        for root in [0, size - 1] {
            let x = r.runtime.upload(&values::<T>(me, part))?;
            r.comm.reduce(stream, &x, how, root)?;
            let want = if me == root { reduced(how, size, part) } else { values(me, part) };
            all.push((format!("reduce {how} to {root}"), x, want));
        }
    }
    let gathered: Vec<T> = (0..size).flat_map(|rank| values::<T>(rank, part)).collect();
    let (x, y) = (r.runtime.upload(&values::<T>(me, part))?, r.runtime.zeros::<T>(part * n)?);
    r.comm.all_gather(stream, &y, &x)?;
    all.push(("all_gather".into(), y, gathered.clone()));
    let y = r.runtime.zeros::<T>(part * n)?;
    r.runtime
        .stream()
        .upload(y.slice(own * part..(own + 1) * part).view(), &values::<T>(me, part))?;
    r.comm.all_gather(stream, &y, y.slice(own * part..(own + 1) * part))?;
    all.push(("all_gather in place".into(), y, gathered));

    for root in [0, size - 1] {
        let x = r.runtime.upload(&values::<T>(me, part))?;
        r.comm.broadcast(stream, &x, root)?;
        all.push((format!("broadcast of {root}"), x, values(root, part)));
    }
    let (x, y) = (r.runtime.upload(&values::<T>(me, part * n))?, r.runtime.zeros::<T>(part * n)?);
    r.comm.all_to_all(stream, &y, &x)?;
    let want =
        (0..size).flat_map(|from| values::<T>(from, part * n)[own * part..][..part].to_vec());
    all.push(("all_to_all".into(), y, want.collect()));
    r.comm.barrier(stream)?;
    if size > 1 {
        let (before, after) = ((me + size - 1) % size, (me + 1) % size);
        let (x, y) = (r.runtime.upload(&values::<T>(me, part))?, r.runtime.zeros::<T>(part)?);
        r.comm.group(stream, |g| {
            g.send(&x, after)?;
            g.recv(&y, before)
        })?;
        all.push(("send and recv in a group".into(), y, values(before, part)));
        // One by one.
        let x = r.runtime.upload(&values::<T>(me, part))?;
        match me {
            0 => r.comm.send(stream, x.slice(1..), size - 1)?,
            last if last == size - 1 => r.comm.recv(stream, x.slice(..part - 1), 0)?,
            _ => {}
        }
        let mut want = values::<T>(me, part);
        if me == size - 1 {
            want[..part - 1].copy_from_slice(&values::<T>(0, part)[1..]);
        }
        all.push(("send and recv".into(), x, want));
    }
    Ok(all)
}

fn eager_and_recorded<T: Value>(r: &Rank) -> Result<()> {
    let bytes = |x: &[T]| bytemuck::cast_slice::<T, u8>(x).to_vec();
    for recorded in [false, true] {
        let stream = r.runtime.stream();
        let mut expected = Vec::new();
        if recorded {
            let graph = r.runtime.record_graph(|recording| {
                expected = calls::<T>(r, recording.stream())?;
                Ok(())
            })?;
            graph.launch_on(stream)?;
        } else {
            expected = calls::<T>(r, stream)?;
        }
        for (what, memory, want) in expected {
            let got = r.runtime.to_vec(&memory)?;
            let mode = if recorded { "recorded" } else { "eager" };
            assert_eq!(
                bytes(&got),
                bytes(&want),
                "{what} of {} on rank {} of {}, {mode}: {got:?}, not {want:?}",
                T::TYPE,
                r.me(),
                r.world.size()
            );
        }
    }
    Ok(())
}

fn every_type(size: u32) {
    ranks(size, |r| {
        eager_and_recorded::<i8>(r)?;
        eager_and_recorded::<u8>(r)?;
        eager_and_recorded::<i16>(r)?;
        eager_and_recorded::<u16>(r)?;
        eager_and_recorded::<i32>(r)?;
        eager_and_recorded::<u32>(r)?;
        eager_and_recorded::<i64>(r)?;
        eager_and_recorded::<u64>(r)?;
        eager_and_recorded::<f16>(r)?;
        eager_and_recorded::<bf16>(r)?;
        eager_and_recorded::<f32>(r)?;
        eager_and_recorded::<f64>(r)
    });
}

#[test]
fn one_rank_computes_as_the_model_does() {
    every_type(1);
}

#[test]
fn two_to_four_ranks_compute_as_the_model_does() {
    (2..=4).for_each(every_type);
}

#[test]
fn five_to_eight_ranks_compute_as_the_model_does() {
    (5..=8).for_each(every_type);
}

#[test]
fn sixty_four_ranks_compute_as_the_model_does() {
    ranks(64, eager_and_recorded::<bf16>);
}

/// Numbers whose sums depend on the order.
fn uneven(rank: u32, len: usize) -> Vec<f32> {
    let mut state = u64::from(rank) + 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 1000.0 - 8000.0
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn sums_are_equal_to_the_bit_on_all_ranks_and_in_replays() {
    let sums = ranks(7, |r| {
        let mut all = Vec::new();
        let x = r.runtime.upload(&uneven(r.me(), 3000))?;
        let y = r.runtime.zeros::<f32>(3000)?;
        let graph = r.runtime.record_graph(|recording| {
            r.comm.all_reduce_into(recording.stream(), &y, &x, Reduce::Sum)
        })?;
        for turn in 0..8 {
            r.runtime.stream().fill(y.view(), 0u8)?;
            match turn % 2 {
                0 => r.comm.all_reduce_into(r.runtime.stream(), &y, &x, Reduce::Sum)?,
                _ => graph.launch_on(r.runtime.stream()).map(drop)?,
            }
            all.push(r.runtime.to_vec(&y)?);
        }
        Ok(all)
    });
    let want: Vec<f32> = (0..3000)
        .map(|i| (1..7).fold(uneven(0, 3000)[i], |sum, rank| sum + uneven(rank, 3000)[i]))
        .collect();
    for sum in sums.iter().flatten() {
        assert!(std::iter::zip(sum, &want).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn what_is_no_number_is_ignored_and_equal_zeros_keep_the_first() {
    ranks(2, |r| {
        let own: [f32; 4] = match r.me() {
            0 => [f32::NAN, 1.0, f32::NAN, 0.0],
            _ => [2.0, f32::NAN, f32::NAN, -0.0],
        };
        for how in [Reduce::Least, Reduce::Largest] {
            let x = r.runtime.upload(&own)?;
            r.comm.all_reduce(r.runtime.stream(), &x, how)?;
            let got = r.runtime.to_vec(&x)?;
            assert_eq!(&got[..2], [2.0, 1.0], "{how}");
            assert!(got[2].is_nan() && got[3].to_bits() == 0, "{how}: {got:?}");
        }
        Ok(())
    });
}

#[test]
fn parts_without_elements_count_as_calls() {
    ranks(3, |r| {
        let (x, empty) = (r.runtime.upload(&[1u64, 2])?, r.runtime.zeros::<u64>(0)?);
        let stream = r.runtime.stream();
        r.comm.all_reduce(stream, &empty, Reduce::Sum)?;
        r.comm.all_reduce(stream, x.slice(1..1), Reduce::Sum)?;
        r.comm.all_gather(stream, &empty, &empty)?;
        r.comm.all_to_all(stream, &empty, &empty)?;
        r.comm.broadcast(stream, &empty, 2)?;
        r.comm.group(stream, |_| Ok(()))?; // no call at all
        r.comm.all_reduce(stream, &x, Reduce::Sum)?;
        assert_eq!(r.runtime.to_vec(&x)?, [3, 6]);
        Ok(())
    });
}

#[test]
fn collectives_of_two_streams_and_communicators_have_one_order() {
    ranks(3, |r| {
        let other = r.world.comm(&r.runtime, &crate::common::config())?;
        let (one, two) = (r.runtime.create_stream()?, r.runtime.create_stream()?);
        let (x, y) = (r.runtime.upload(&[1u32])?, r.runtime.upload(&[1u32])?);
        for _ in 0..50 {
            // Without the token the second could run first on some ranks.
            r.comm.all_reduce(&one, &x, Reduce::Largest)?;
            other.all_reduce(&two, &y, Reduce::Largest)?;
            other.barrier(&one)?;
            r.comm.barrier(&two)?;
        }
        assert_eq!((r.runtime.to_vec(&x)?, r.runtime.to_vec(&y)?), (vec![1], vec![1]));
        Ok(())
    });
}

#[test]
fn calls_are_ordered_with_other_work_on_their_memory() {
    ranks(4, |r| {
        let (copies, stream) = (r.runtime.create_stream()?, r.runtime.stream());
        let (x, y) = (r.runtime.zeros::<u32>(256)?, r.runtime.zeros::<u32>(256)?);
        for turn in 1..=40u32 {
            copies.fill(x.view(), turn + r.me())?;
            r.comm.all_reduce(stream, &x, Reduce::Sum)?;
            copies.copy(y.view(), x.view())?;
            let got = r.runtime.to_vec(&y)?;
            assert!(got.iter().all(|&sum| sum == 4 * turn + 6), "turn {turn}: {got:?}");
        }
        Ok(())
    });
}

#[test]
fn temporaries_and_updates_of_graphs_reach_the_calls() {
    ranks(2, |r| {
        let (x, other) = (r.runtime.upload(&[1i32, 2])?, r.runtime.upload(&[10i32, 20])?);
        let y = r.runtime.zeros::<i32>(2)?;
        let graph = r.runtime.record_graph(|recording| {
            let scratch = recording.alloc_array::<i32>(2)?;
            recording.stream().copy(scratch.view(), x.view())?;
            r.comm.all_reduce(recording.stream(), &scratch, Reduce::Sum)?;
            recording.stream().copy(y.view(), scratch.view())
        })?;
        graph.launch()?;
        assert_eq!(r.runtime.to_vec(&y)?, [2, 4]);
        let _ = graph.update(&leasehold::GraphUpdate::new().buffer(&x, &other))?;
        graph.launch_on(r.runtime.stream())?;
        assert_eq!(r.runtime.to_vec(&y)?, [20, 40]);
        Ok(())
    });
}

#[test]
fn an_update_that_brings_one_buffer_twice_into_a_group_fails_the_launch() {
    ranks(2, |r| {
        let (x, y) = (r.runtime.upload(&[1u32; 8])?, r.runtime.zeros::<u32>(8)?);
        let other = 1 - r.me();
        let graph = r.runtime.record_graph(|recording| {
            r.comm.group(recording.stream(), |g| {
                g.send(&x, other)?;
                g.recv(&y, other)
            })
        })?;
        let _ = graph.update(&leasehold::GraphUpdate::new().buffer(&y, &x))?;
        // The other rank may have failed before, and said so.
        let launched = graph.launch_on(r.runtime.stream());
        let over = launched.and_then(|_| r.runtime.stream().synchronize());
        let error = over.unwrap_err().to_string();
        assert!(error.contains("overlap") || error.contains("is lost"), "{error}");
        Ok(())
    });
}

#[test]
fn calls_pass_a_backend_that_checks_every_submission() {
    use leasehold::backend::Validated;
    use leasehold::{Context, DeviceId};
    let sums = crate::common::worlds(3, |world| -> Result<Vec<i32>> {
        let checked = Validated::new(leasehold::cpu::CpuBackend::new())?;
        let context = Context::with_backends(vec![std::sync::Arc::new(checked)]);
        let runtime = context.runtime(DeviceId::cpu(0))?;
        let comm = world.comm(&runtime, &crate::common::config())?;
        let (x, y) = (runtime.upload(&[1i32; 6])?, runtime.zeros::<i32>(2)?);
        let graph = runtime.record_graph(|recording| {
            comm.reduce_scatter(recording.stream(), &y, &x, Reduce::Sum)
        })?;
        graph.launch()?;
        comm.all_reduce(runtime.stream(), &y, Reduce::Sum)?;
        runtime.to_vec(&y)
    });
    sums.into_iter().for_each(|sum| assert_eq!(sum.unwrap(), [9, 9]));
}
