//! Every call, type and reduction against a model, eager and recorded.

use crate::{Bench, Over, Rank};
use half::{bf16, f16};
use leasehold::Array;
use leasehold_collective::{Comm, Reduce};
use leasehold_conformance::model::{Number, own, reduced};
use leasehold_sim::{FaultAction, FaultRule, MachineConfig, When};

/// Elements of each rank's part.
const COUNT: usize = 5;

/// Makes every call, and compares what all of them have given at the end.
fn check<T: Number>(r: &Rank, comm: &Comm) {
    let (stream, rank, size) = (r.runtime.stream(), comm.rank(), comm.size());
    let n = size as usize;
    let upload = |values: Vec<T>| r.runtime.upload(&values).unwrap();
    let mut results: Vec<(String, Array<T>, Vec<T>)> = Vec::new();
    for how in Reduce::ALL {
        // The model rounds once, from f64. Averages of 3 ranks and products of 64 round before.
        if how.check(T::TYPE).is_err()
            || how == Reduce::Average && !size.is_power_of_two()
            || how == Reduce::Product && size > 8
        {
            continue;
        }
        let all: Vec<T> = reduced(size, how, 0, COUNT);
        let x = upload(own(rank, 0, COUNT));
        comm.all_reduce(stream, &x, how).unwrap();
        results.push((format!("all_reduce {how}"), x, all.clone()));
        let (src, dst) = (upload(own(rank, 0, COUNT)), upload(own(9, 0, COUNT)));
        comm.all_reduce_into(stream, &dst, &src, how).unwrap();
        results.push((format!("all_reduce_into {how}"), dst, all.clone()));
        results.push((format!("source of all_reduce_into {how}"), src, own(rank, 0, COUNT)));
        let (src, dst) = (upload(own(rank, 0, n * COUNT)), upload(own(9, 0, COUNT)));
        comm.reduce_scatter(stream, &dst, &src, how).unwrap();
        let part = reduced(size, how, rank as usize * COUNT, COUNT);
        results.push((format!("reduce_scatter {how}"), dst, part));
        let (x, root) = (upload(own(rank, 0, COUNT)), size - 1);
        comm.reduce(stream, &x, how, root).unwrap();
        let expected = if rank == root { all } else { own(rank, 0, COUNT) };
        results.push((format!("reduce {how}"), x, expected));
    }
    let (src, dst) = (upload(own(rank, 0, COUNT)), upload(own(9, 0, n * COUNT)));
    comm.all_gather(stream, &dst, &src).unwrap();
    let all = (0..size).flat_map(|from| own(from, 0, COUNT)).collect();
    results.push(("all_gather".into(), dst, all));
    let (src, dst) = (upload(own(rank, 0, n * COUNT)), upload(own(9, 0, n * COUNT)));
    comm.all_to_all(stream, &dst, &src).unwrap();
    let parts = (0..size).flat_map(|from| own(from, rank as usize * COUNT, COUNT)).collect();
    results.push(("all_to_all".into(), dst, parts));
    for root in 0..size.min(8) {
        let x = upload(own(rank, 0, COUNT));
        comm.broadcast(stream, &x, root).unwrap();
        results.push((format!("broadcast from {root}"), x, own(root, 0, COUNT)));
    }
    if size > 1 {
        let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
        let (src, dst) = (upload(own(rank, 0, COUNT)), upload(own(9, 0, COUNT)));
        comm.group(stream, |g| g.send(&src, to).and_then(|()| g.recv(&dst, from))).unwrap();
        results.push(("a ring of sends".into(), dst, own(from, 0, COUNT)));
    }
    let none = upload(own(rank, 0, 1));
    comm.all_reduce(stream, none.slice(0..0), Reduce::Sum).unwrap();
    results.push(("all_reduce of nothing".into(), none, own(rank, 0, 1)));
    comm.barrier(stream).unwrap();
    for (call, array, expected) in results {
        let got = r.runtime.to_vec(&array).unwrap();
        assert_eq!(got, expected, "{call}, {}, rank {rank} of {size}", T::TYPE);
    }
}

fn check_all(r: &Rank) {
    let comm = r.comm();
    check::<i8>(r, &comm);
    check::<u8>(r, &comm);
    check::<i16>(r, &comm);
    check::<u16>(r, &comm);
    check::<i32>(r, &comm);
    check::<u32>(r, &comm);
    check::<i64>(r, &comm);
    check::<u64>(r, &comm);
    check::<f16>(r, &comm);
    check::<bf16>(r, &comm);
    check::<f32>(r, &comm);
    check::<f64>(r, &comm);
}

fn every_call(over: Over, sizes: impl IntoIterator<Item = u32>) {
    for size in sizes {
        let bench = Bench::new(over, size, MachineConfig::seed(size.into()));
        bench.run(check_all);
        assert_eq!(bench.machine().take_reports(), []);
    }
}

#[test]
fn each_call_computes_what_the_model_does_on_sim() {
    every_call(Over::Sim, 1..=8);
}

#[test]
fn each_call_computes_what_the_model_does_on_simulated_cuda() {
    every_call(Over::Cuda, [1, 2, 3, 8]);
}

#[test]
fn sixty_four_ranks() {
    let bench = Bench::new(Over::Sim, 64, MachineConfig::seed(1));
    bench.run(|r| check::<f32>(r, &r.comm()));
    assert_eq!(bench.machine().take_reports(), []);
}

#[test]
fn stragglers_change_no_result() {
    for over in [Over::Sim, Over::Cuda] {
        let bench = Bench::new(over, 4, MachineConfig::seed(3));
        let late = FaultRule::on("ncclGroupEnd", When::Probability(0.2), FaultAction::Delay(40));
        bench.machine().add_fault(late);
        bench.run(|r| check::<bf16>(r, &r.comm()));
        assert_eq!(bench.machine().take_reports(), []);
    }
}

/// Sums and averages of numbers that no type holds, between work of the rank's own.
fn steps<T: Number>(r: &Rank, comm: &Comm, recorded: bool) -> Vec<u8> {
    let rank = f64::from(comm.rank());
    let x: Vec<T> = (0..64).map(|i| T::of(0.1 * f64::from(i) + rank / 3.0)).collect();
    let (x, n) = (r.runtime.upload(&x).unwrap(), comm.size() as usize);
    let all = r.runtime.zeros::<T>(64 * n).unwrap();
    let program = |stream: &leasehold::Stream| {
        for _ in 0..3 {
            comm.all_reduce(stream, &x, Reduce::Average)?;
            comm.all_gather(stream, &all, &x)?;
            comm.reduce_scatter(stream, &x, &all, Reduce::Sum)?;
        }
        Ok(())
    };
    if recorded {
        let graph = r.runtime.record_graph(|recording| program(recording.stream())).unwrap();
        for _ in 0..2 {
            graph.launch().unwrap();
        }
    } else {
        (0..2).for_each(|_| program(r.runtime.stream()).unwrap());
    }
    r.runtime.to_vec(&x).unwrap().iter().flat_map(bytemuck::bytes_of).copied().collect()
}

#[test]
fn recorded_results_equal_eager_ones_to_the_bit() {
    for over in [Over::Sim, Over::Cuda] {
        for size in [1, 2, 5] {
            let bench = Bench::new(over, size, MachineConfig::seed(size.into()));
            let all = bench.run(|r| {
                let comm = r.comm();
                [false, true].map(|recorded| {
                    [
                        steps::<f32>(r, &comm, recorded),
                        steps::<f64>(r, &comm, recorded),
                        steps::<f16>(r, &comm, recorded),
                        steps::<bf16>(r, &comm, recorded),
                    ]
                })
            });
            for [eager, recorded] in &all {
                assert_eq!(eager, recorded, "{over:?}, {size} ranks");
            }
            assert_eq!(bench.machine().take_reports(), []);
        }
    }
}
