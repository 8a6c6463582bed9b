//! The calls of collectives, beside a sequential model.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error};
use crate::env::Env;
use crate::model::{Number, own, reduced};
use crate::ranks::{Rank, ranks, together};
use half::{bf16, f16};
use leasehold::Array;
use leasehold_collective::{Comm, Reduce};

/// A call is a library call in a stream.
const CALLS: &[Need] = &[Need::ForeignCalls];

pub(crate) const CASES: &[Case] = &[
    Case::runtime(162, "collective all_reduce gives all ranks one reduction", CALLS, all_reduce)
        .replayed(),
    Case::runtime(163, "collective all_reduce into other memory keeps its source", CALLS, into)
        .replayed(),
    Case::runtime(164, "collective all_gather orders parts by rank", CALLS, all_gather).replayed(),
    Case::runtime(165, "collective all_gather works in place", CALLS, gather_in_place).replayed(),
    Case::runtime(166, "collective reduce_scatter gives each rank its part", CALLS, reduce_scatter)
        .replayed(),
    Case::runtime(167, "collective reduce_scatter works in place", CALLS, scatter_in_place)
        .replayed(),
    Case::runtime(168, "collective broadcast gives the root's elements", CALLS, broadcast)
        .replayed(),
    Case::runtime(169, "collective reduce changes the root's memory only", CALLS, reduce)
        .replayed(),
    Case::runtime(170, "collective all_to_all exchanges parts", CALLS, all_to_all).replayed(),
    Case::runtime(171, "collective send and recv move elements one way", CALLS, one_way).replayed(),
    Case::runtime(172, "collective sends and receives of a group go both ways", CALLS, both_ways)
        .replayed(),
    Case::runtime(173, "collective calls take elements of every type", CALLS, types).replayed(),
    Case::runtime(174, "collective reductions take integers of 16 bits", CALLS, short).replayed(),
    Case::runtime(175, "collective sums of integers wrap", CALLS, wraps).replayed(),
    Case::runtime(176, "collective calls leave what is beside a part", CALLS, parts).replayed(),
    Case::runtime(177, "collective calls without elements count", CALLS, empty).replayed(),
    Case::runtime(178, "collective calls that cannot be right do not count", CALLS, refused)
        .replayed(),
    Case::runtime(179, "collective calls of one rank give its own elements", CALLS, alone)
        .replayed(),
];

/// Elements of a rank's part.
const PART: usize = 5;

/// Whether all partial results of the case's numbers are exact.
fn exact(how: Reduce, size: u32) -> bool {
    how != Reduce::Average || size.is_power_of_two()
}

/// Tries a call with each reduction.
fn each_reduction(env: &Env, call: impl Fn(&Rank<'_>, &Comm, Reduce) -> Outcome + Sync) -> Outcome {
    together(env, 3, |r, comm| {
        Reduce::ALL
            .into_iter()
            .filter(|&how| exact(how, r.size()))
            .try_for_each(|how| call(r, comm, how))
    })
}

fn all_reduce(env: &Env) -> Outcome {
    each_reduction(env, |r, comm, how| {
        let x = r.runtime.upload(&own::<f32>(r.me(), 0, 700))?;
        r.make(|stream| comm.all_reduce(stream, &x, how))?;
        r.holds(&format!("all_reduce {how}"), &x, &reduced(r.size(), how, 0, 700))
    })
}

fn into(env: &Env) -> Outcome {
    each_reduction(env, |r, comm, how| {
        let x = r.runtime.upload(&own::<f32>(r.me(), 0, PART))?;
        let y = r.runtime.upload(&own::<f32>(9, 0, PART))?;
        r.make(|stream| comm.all_reduce_into(stream, &y, &x, how))?;
        r.holds(&format!("all_reduce_into {how}"), &y, &reduced(r.size(), how, 0, PART))?;
        r.holds("the source of all_reduce_into", &x, &own(r.me(), 0, PART))
    })
}

/// The parts of all ranks, in their order.
fn gathered<T: Number>(size: u32) -> Vec<T> {
    (0..size).flat_map(|rank| own(rank, 0, PART)).collect()
}

fn all_gather(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let x = r.runtime.upload(&own::<f32>(r.me(), 0, PART))?;
        let y = r.runtime.zeros::<f32>(PART * r.size() as usize)?;
        r.make(|stream| comm.all_gather(stream, &y, &x))?;
        r.holds("all_gather", &y, &gathered(r.size()))?;
        r.holds("the source of all_gather", &x, &own(r.me(), 0, PART))
    })
}

/// A rank's part of memory with a part for each rank.
fn mine(r: &Rank<'_>) -> std::ops::Range<usize> {
    let at = r.me() as usize * PART;
    at..at + PART
}

fn gather_in_place(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let y = r.runtime.zeros::<f32>(PART * r.size() as usize)?;
        r.stream().upload(y.slice(mine(r)).view(), &own::<f32>(r.me(), 0, PART))?;
        r.make(|stream| comm.all_gather(stream, &y, y.slice(mine(r))))?;
        r.holds("all_gather in place", &y, &gathered(r.size()))
    })
}

fn reduce_scatter(env: &Env) -> Outcome {
    each_reduction(env, |r, comm, how| {
        let (whole, part) = (PART * r.size() as usize, mine(r));
        let x = r.runtime.upload(&own::<f32>(r.me(), 0, whole))?;
        let y = r.runtime.zeros::<f32>(PART)?;
        r.make(|stream| comm.reduce_scatter(stream, &y, &x, how))?;
        let want = reduced::<f32>(r.size(), how, part.start, PART);
        r.holds(&format!("reduce_scatter {how}"), &y, &want)?;
        r.holds("the source of reduce_scatter", &x, &own(r.me(), 0, whole))
    })
}

fn scatter_in_place(env: &Env) -> Outcome {
    each_reduction(env, |r, comm, how| {
        let (whole, part) = (PART * r.size() as usize, mine(r));
        let x = r.runtime.upload(&own::<f32>(r.me(), 0, whole))?;
        r.make(|stream| comm.reduce_scatter(stream, x.slice(part.clone()), &x, how))?;
        let want = reduced::<f32>(r.size(), how, part.start, PART);
        let got = r.read(&x)?[part].to_vec();
        check_eq!(got, want, "the part of reduce_scatter {how} in place");
        Ok(())
    })
}

fn broadcast(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        (0..r.size()).try_for_each(|root| {
            let x = r.runtime.upload(&own::<f32>(r.me(), 0, PART))?;
            r.make(|stream| comm.broadcast(stream, &x, root))?;
            r.holds(&format!("broadcast of rank {root}"), &x, &own(root, 0, PART))
        })
    })
}

fn reduce(env: &Env) -> Outcome {
    each_reduction(env, |r, comm, how| {
        (0..r.size()).try_for_each(|root| {
            let x = r.runtime.upload(&own::<f32>(r.me(), 0, PART))?;
            r.make(|stream| comm.reduce(stream, &x, how, root))?;
            let want = match r.me() == root {
                true => reduced(r.size(), how, 0, PART),
                false => own(r.me(), 0, PART),
            };
            r.holds(&format!("reduce {how} to rank {root}"), &x, &want)
        })
    })
}

fn all_to_all(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let whole = PART * r.size() as usize;
        let x = r.runtime.upload(&own::<f32>(r.me(), 0, whole))?;
        let y = r.runtime.zeros::<f32>(whole)?;
        r.make(|stream| comm.all_to_all(stream, &y, &x))?;
        let want: Vec<f32> =
            (0..r.size()).flat_map(|from| own(from, mine(r).start, PART)).collect();
        r.holds("all_to_all", &y, &want)?;
        r.holds("the source of all_to_all", &x, &own(r.me(), 0, whole))
    })
}

fn one_way(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let x = r.runtime.upload(&own::<f32>(r.me(), 0, PART))?;
        let (y, last) = (r.runtime.zeros::<f32>(PART)?, r.size() - 1);
        r.make(|stream| {
            match r.me() {
                0 => comm.send(stream, x.slice(1..), last)?,
                me if me == last => comm.recv(stream, y.slice(..PART - 1), 0)?,
                _ => {}
            }
            // Each rank's recording has a call.
            comm.barrier(stream)
        })?;
        let mut want = [0.0; PART];
        if r.me() == last {
            want[..PART - 1].copy_from_slice(&own::<f32>(0, 1, PART - 1));
        }
        r.holds("send and recv", &y, &want)
    })
}

fn both_ways(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let (after, before) = ((r.me() + 1) % r.size(), (r.me() + r.size() - 1) % r.size());
        let x = r.runtime.upload(&own::<f32>(r.me(), 0, 2 * PART))?;
        let (y, z) = (r.runtime.zeros::<f32>(PART)?, r.runtime.zeros::<f32>(PART)?);
        r.make(|stream| {
            comm.group(stream, |group| {
                group.send(x.slice(..PART), after)?;
                group.send(x.slice(PART..), before)?;
                group.recv(&y, before)?;
                group.recv(&z, after)
            })
        })?;
        if r.size() == 2 {
            // Both sends go to the same rank, in their order.
            r.holds("the first of a group", &y, &own(after, 0, PART))?;
            return r.holds("the second of a group", &z, &own(after, PART, PART));
        }
        r.holds("what comes from the rank before", &y, &own(before, 0, PART))?;
        r.holds("what comes from the rank after", &z, &own(after, PART, PART))
    })
}

/// Reduces and gathers elements of a type.
fn of_type<T: Number>(r: &Rank<'_>, comm: &Comm) -> Outcome {
    for how in Reduce::ALL {
        if how.check(T::TYPE).is_err() || !exact(how, r.size()) {
            continue;
        }
        let x = r.runtime.upload(&own::<T>(r.me(), 0, PART))?;
        r.make(|stream| comm.all_reduce(stream, &x, how))?;
        let what = format!("all_reduce {how} of {}", T::TYPE);
        r.holds(&what, &x, &reduced(r.size(), how, 0, PART))?;
    }
    moved::<T>(r, comm)
}

fn moved<T: Number>(r: &Rank<'_>, comm: &Comm) -> Outcome {
    let x = r.runtime.upload(&own::<T>(r.me(), 0, PART))?;
    let y: Array<T> = r.runtime.zeros(PART * r.size() as usize)?;
    r.make(|stream| comm.all_gather(stream, &y, &x))?;
    r.holds(&format!("all_gather of {}", T::TYPE), &y, &gathered(r.size()))
}

fn types(env: &Env) -> Outcome {
    together(env, 2, |r, comm| {
        of_type::<i8>(r, comm)?;
        of_type::<u8>(r, comm)?;
        moved::<i16>(r, comm)?;
        moved::<u16>(r, comm)?;
        of_type::<i32>(r, comm)?;
        of_type::<u32>(r, comm)?;
        of_type::<i64>(r, comm)?;
        of_type::<u64>(r, comm)?;
        of_type::<f16>(r, comm)?;
        of_type::<bf16>(r, comm)?;
        of_type::<f32>(r, comm)?;
        of_type::<f64>(r, comm)
    })
}

fn short(env: &Env) -> Outcome {
    together(env, 2, |r, comm| {
        of_type::<i16>(r, comm)?;
        of_type::<u16>(r, comm)
    })
}

fn wraps(env: &Env) -> Outcome {
    together(env, 2, |r, comm| {
        let x = r.runtime.upload(&[u32::MAX, 1 << 31, 7])?;
        let y = r.runtime.upload(&[i8::MAX, i8::MIN, 7])?;
        r.make(|stream| {
            comm.all_reduce(stream, &x, Reduce::Sum)?;
            comm.all_reduce(stream, &y, Reduce::Sum)
        })?;
        r.holds("sums of u32", &x, &[u32::MAX - 1, 0, 14])?;
        r.holds("sums of i8", &y, &[-2, 0, 14])
    })
}

fn parts(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let x = r.runtime.upload(&own::<f32>(r.me(), 0, 3 * PART))?;
        let y = r.runtime.upload(&own::<f32>(9, 0, 3 * PART))?;
        let part = PART..2 * PART;
        r.make(|stream| {
            comm.all_reduce_into(stream, y.slice(part.clone()), x.slice(1..=PART), Reduce::Sum)?;
            comm.broadcast(stream, x.slice(part.clone()), 0)
        })?;
        let mut want = own::<f32>(9, 0, 3 * PART);
        want[part.clone()].copy_from_slice(&reduced::<f32>(r.size(), Reduce::Sum, 1, PART));
        r.holds("a part that was reduced", &y, &want)?;
        let mut want = own::<f32>(r.me(), 0, 3 * PART);
        want[part].copy_from_slice(&own::<f32>(0, PART, PART));
        r.holds("a part that was broadcast", &x, &want)
    })
}

fn empty(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let (x, none) =
            (r.runtime.upload(&own::<f32>(r.me(), 0, PART))?, r.runtime.zeros::<f32>(0)?);
        r.make(|stream| {
            comm.all_reduce(stream, &none, Reduce::Sum)?;
            comm.all_reduce(stream, x.slice(1..1), Reduce::Sum)?;
            comm.all_gather(stream, &none, &none)?;
            comm.all_to_all(stream, &none, &none)?;
            comm.broadcast(stream, &none, 0)?;
            comm.group(stream, |_| Ok(()))?; // no call at all
            comm.all_reduce(stream, &x, Reduce::Sum)
        })?;
        r.holds("all_reduce after calls of nothing", &x, &reduced(r.size(), Reduce::Sum, 0, PART))
    })
}

fn refused(env: &Env) -> Outcome {
    together(env, 2, |r, comm| {
        let x = r.runtime.upload(&own::<f32>(r.me(), 0, PART))?;
        let (y, whole) = (r.runtime.zeros::<f32>(PART)?, r.runtime.upload(&[1u32; 2])?);
        let other = 1;
        let mut wrong = Vec::new();
        r.make(|stream| {
            // One rank alone, so that a call which counted would be missed by the other.
            if r.me() == 0 {
                wrong = vec![
                    ("another length", comm.all_reduce_into(stream, &y, x.slice(1..), Reduce::Sum)),
                    ("a root that is not there", comm.broadcast(stream, &x, r.size())),
                    ("a rank that is not there", comm.send(stream, &x, r.size())),
                    ("this rank", comm.send(stream, &x, r.me())),
                    ("an average of integers", comm.all_reduce(stream, &whole, Reduce::Average)),
                    ("parts that are no parts", comm.all_gather(stream, &y, &x)),
                    (
                        "memory that is sent and received",
                        comm.group(stream, |group| {
                            group.send(&x, other)?;
                            group.recv(&x, other)
                        }),
                    ),
                ];
            }
            comm.all_reduce(stream, &x, Reduce::Sum)
        })?;
        for (what, result) in wrong {
            expect_error(result, "InvalidArgument", what)?;
        }
        r.holds("all_reduce after refused calls", &x, &reduced(r.size(), Reduce::Sum, 0, PART))
    })
}

fn alone(env: &Env) -> Outcome {
    ranks(env, 2, |r| {
        let part = r.comm()?.split(Some(r.me()), 0)?;
        check!(part.is_some(), "a rank with a colour has no part");
        let Some(part) = part else { return Ok(()) };
        check_eq!((part.rank(), part.size()), (0, 1), "the only rank of its colour");
        let x = r.runtime.upload(&own::<f32>(r.me(), 0, PART))?;
        let y = r.runtime.zeros::<f32>(PART)?;
        r.make(|stream| {
            part.all_reduce(stream, &x, Reduce::Sum)?;
            part.all_gather(stream, &y, &x)?;
            part.broadcast(stream, &x, 0)?;
            part.barrier(stream)
        })?;
        r.holds("all_reduce of one rank", &x, &own(r.me(), 0, PART))?;
        r.holds("all_gather of one rank", &y, &own(r.me(), 0, PART))
    })
    .map(drop)
}
