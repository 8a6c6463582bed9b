//! The benchmark behind `leasehold-workbench bench memory` (feature `bench`).
//!
//! Each figure alternates rounds of this crate, of the plain design ([`Plain`]) and, if named, of a
//! reference of the standard library, in this process. The reported figures are medians of the
//! rounds. The module prints nothing.

use std::ffi::c_void;
use std::hint::black_box;
use std::time::Instant;

use leasehold_core::sync::Arc;
use leasehold_core::{Result, threads};
use serde::Serialize;

use crate::OpaqueTensor;
use crate::workload::{Abi, Global, Plain, program};

/// The options of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Threads of the scaling figure; 0 means the number of processors, at least 2.
    /// Default: 0.
    pub threads: usize,
    /// Rounds of each figure, of which the median counts.
    /// Default: 15.
    pub rounds: usize,
    /// Operations in each round.
    /// Default: 200,000.
    pub operations: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { threads: 0, rounds: 15, operations: 200_000 }
    }
}

impl Options {
    /// Short rounds, as a smoke test.
    pub fn quick() -> Self {
        Self { rounds: 3, operations: 2_000, ..Self::default() }
    }
}

/// One figure, in nanoseconds per operation.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Figure {
    /// The measured operation.
    pub name: String,
    /// Threads at work.
    pub threads: usize,
    /// This crate, through the C ABI.
    pub leasehold_ns: f64,
    /// The plain `Mutex<HashMap>` design.
    pub plain_ns: f64,
    /// The name and time of a relative goal's reference.
    pub reference: Option<(String, f64)>,
    /// The value that the goal limits, in `unit`.
    pub value: f64,
    /// `ns`, or `x` for ratios.
    pub unit: String,
    /// The goal for `value`; `None` for figures that only compare.
    pub goal: Option<f64>,
    /// Says whether the goal is a lower bound.
    pub at_least: bool,
}

impl Figure {
    /// Returns whether the goal, if there is one, is reached.
    pub fn reached(&self) -> bool {
        self.goal
            .is_none_or(|goal| if self.at_least { self.value >= goal } else { self.value <= goal })
    }
}

/// All figures, with their origin.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// Version of this crate.
    pub version: String,
    /// Says whether it was built with optimisation; goals mean nothing without.
    pub optimised: bool,
    /// Processors available.
    pub processors: usize,
    /// The figures.
    pub figures: Vec<Figure>,
}

unsafe extern "C" fn free_tensor(tensor: *mut OpaqueTensor) {
    // SAFETY: the benchmark's tensors come from `malloc`.
    unsafe { libc::free(tensor.cast()) };
}

/// Nanoseconds of processor time per operation, for each of `runs` in alternation; the medians.
/// Processor time reduces the influence of other processes.
fn medians<const N: usize>(options: Options, mut runs: [&mut dyn FnMut(usize); N]) -> [f64; N] {
    let mut times = [const { Vec::new() }; N];
    for round in 0..=options.rounds {
        for (run, times) in runs.iter_mut().zip(&mut times) {
            let start = thread_time();
            run(options.operations);
            let time = (thread_time() - start) * 1e9 / options.operations as f64;
            // The first round warms up.
            if round > 0 {
                times.push(time);
            }
        }
    }
    times.map(|mut t| {
        t.sort_by(f64::total_cmp);
        t.get(t.len() / 2).copied().unwrap_or(f64::NAN)
    })
}

fn empty_scopes(abi: &impl Abi, n: usize) {
    for _ in 0..n {
        abi.enter_scope();
        abi.exit_scope();
    }
}

fn counts(abi: &impl Abi, object: *mut c_void, n: usize) {
    for _ in 0..n {
        abi.acquire(object);
        abi.release(object);
    }
}

/// One 64-byte struct in each scope.
fn structs(abi: &impl Abi, n: usize) {
    for _ in 0..n {
        abi.enter_scope();
        // SAFETY: a new block of the C allocator that no other code frees.
        unsafe { abi.register_struct(black_box(libc::malloc(64))) };
        abi.exit_scope();
    }
}

fn buffers(abi: &impl Abi, n: usize) {
    abi.function_enter(2);
    for _ in 0..n {
        black_box(abi.get_buffer(1, 100));
    }
    abi.function_exit();
}

/// The work of a thread of the scaling figure, 16 operations in each turn: scopes, structs, counts,
/// a frame with a buffer.
fn mixed(abi: &impl Abi, n: usize) {
    for _ in 0..n {
        abi.function_enter(1);
        black_box(abi.get_buffer(0, 48));
        // SAFETY: `malloc` has no conditions.
        let object = unsafe { libc::malloc(64) };
        // SAFETY: a new block of the C allocator that no other code frees.
        unsafe { abi.register_struct(object) };
        for _ in 0..2 {
            abi.enter_scope();
            abi.acquire(object);
            // SAFETY: each is a new block of the C allocator that no other code frees.
            unsafe { abi.register_struct(libc::malloc(64)) };
            abi.release(object);
            abi.exit_scope();
        }
        abi.enter_scope();
        abi.exit_scope();
        abi.function_exit();
    }
}

/// The processor time of the calling thread so far, in seconds.
fn thread_time() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the struct is ours to fill in. The clock exists on every supported system.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// `threads` threads that each run `mixed(n)` at the same time: wall time, and mean processor time
/// of a thread, in seconds.
fn parallel<A: Abi + Send + 'static>(abi: &Arc<A>, threads: usize, n: usize) -> Result<(f64, f64)> {
    let barrier = std::sync::Barrier::new(threads);
    let one = || {
        mixed(&**abi, n / 10);
        barrier.wait();
        let (start, busy) = (Instant::now(), thread_time());
        mixed(&**abi, n);
        (start, Instant::now(), thread_time() - busy)
    };
    let times = threads::run((0..threads).map(|_| one))?;
    let busy: f64 = times.iter().map(|t| t.2).sum();
    let (first, last) = (times.iter().map(|t| t.0).min(), times.iter().map(|t| t.1).max());
    let wall = first.zip(last).map_or(f64::NAN, |(first, last)| (last - first).as_secs_f64());
    Ok((wall, busy / threads as f64))
}

fn figure(
    name: &str,
    threads: usize,
    ours: f64,
    plain: f64,
    value: f64,
    unit: &str,
    goal: Option<f64>,
) -> Figure {
    Figure {
        name: name.into(),
        threads,
        leasehold_ns: ours,
        plain_ns: plain,
        reference: None,
        value,
        unit: unit.into(),
        goal,
        at_least: false,
    }
}

/// Runs the benchmark, which takes some seconds with the default options.
///
/// # Errors
/// `Unavailable` if the system refuses a thread.
pub fn run(options: Options) -> Result<Report> {
    let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = if options.threads == 0 { processors.max(2) } else { options.threads };
    // Checks the number of threads before any measurement.
    threads::run((0..threads).map(|_| || ()))?;
    let plain = Arc::new(Plain::new(free_tensor, true));
    let ours = Arc::new(Global);
    let mut figures = Vec::new();

    let [a, b] =
        medians(options, [&mut |n| empty_scopes(&*ours, n), &mut |n| empty_scopes(&*plain, n)]);
    figures.push(figure("enter_scope + exit_scope, empty", 1, a, b, a, "ns", Some(5.0)));

    // SAFETY: two fresh blocks, one for each manager, which frees it in the end.
    let (object, other) = unsafe { (libc::malloc(64), libc::malloc(64)) };
    // SAFETY: each manager gets a block of its own, which only it frees.
    unsafe {
        ours.enter_scope();
        ours.register_struct(object);
        plain.enter_scope();
        plain.register_struct(other);
    }
    let arc = Arc::new(0u64);
    let mut clone_drop = |n| {
        for _ in 0..n {
            drop(black_box(Arc::clone(black_box(&arc))));
        }
    };
    let [a, b, r] = medians(
        options,
        [&mut |n| counts(&*ours, object, n), &mut |n| counts(&*plain, other, n), &mut clone_drop],
    );
    ours.exit_scope();
    plain.exit_scope();
    let mut f = figure("acquire + release", 1, a, b, a / r, "x", Some(1.5));
    f.reference = Some(("Arc clone + drop".into(), r));
    figures.push(f);

    let mut malloc_free = |n| {
        for _ in 0..n {
            // SAFETY: freed right away.
            unsafe { libc::free(black_box(libc::malloc(64))) };
        }
    };
    let [a, b, r] = medians(
        options,
        [&mut |n| structs(&*ours, n), &mut |n| structs(&*plain, n), &mut malloc_free],
    );
    let mut f = figure(
        "enter + register 64-byte struct + exit, without malloc + free",
        1,
        a,
        b,
        a - r,
        "ns",
        Some(40.0),
    );
    f.reference = Some(("malloc + free".into(), r));
    figures.push(f);

    let [a, b] = medians(options, [&mut |n| buffers(&*ours, n), &mut |n| buffers(&*plain, n)]);
    figures.push(figure("get_buffer, hit", 1, a, b, a, "ns", Some(5.0)));

    figures.extend(scaling(options, &ours, &plain, processors, threads)?);
    for mix in program::Mix::ALL {
        figures.push(mix_figure(options, mix, &ours, &plain));
    }
    Ok(Report {
        version: env!("CARGO_PKG_VERSION").into(),
        optimised: !cfg!(debug_assertions),
        processors,
        figures,
    })
}

/// The gain of `threads` threads over one: in wall time and in processor time. The goal applies to
/// the first, which other processes influence. The second shows the cost that the threads cause
/// each other.
fn scaling(
    options: Options,
    ours: &Arc<Global>,
    plain: &Arc<Plain>,
    processors: usize,
    threads: usize,
) -> Result<[Figure; 2]> {
    let n = options.operations.div_ceil(4);
    let (mut one, mut many, mut many_plain) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.rounds.clamp(1, 7) {
        one.push(parallel(ours, 1, n)?);
        many.push(parallel(ours, threads, n)?);
        many_plain.push(parallel(plain, threads, n / 10)?);
    }
    // The best round, because other processes only ever add time.
    let best = |times: &[(f64, f64)], pick: fn(&(f64, f64)) -> f64| {
        times.iter().map(pick).fold(f64::INFINITY, f64::min)
    };
    // 7 of 8 threads' work, as far as processors exist: 1.8 on two.
    let usable = threads.min(processors);
    let goal = if usable >= 8 { 7.0 } else { 0.9 * usable as f64 };
    Ok([("wall", (|t| t.0) as fn(&(f64, f64)) -> f64), ("processor", |t| t.1)].map(
        |(clock, pick)| {
            let (one, many, plain) =
                (best(&one, pick), best(&many, pick), best(&many_plain, pick) * 10.0);
            let speedup = one * threads as f64 / many;
            let name = format!("speed-up over one thread, mixed turn, {clock} time");
            let turn = 1e9 / n as f64;
            let mut f = figure(
                &name,
                threads,
                many * turn,
                plain * turn,
                speedup,
                "x",
                (clock == "wall").then_some(goal),
            );
            f.reference = Some(("one thread".into(), one * turn));
            f.at_least = true;
            f
        },
    ))
}

/// Executes a program of a mix repeatedly, `n` operations in all.
fn mix_figure(options: Options, mix: program::Mix, ours: &Global, plain: &Plain) -> Figure {
    let program = program::generate(7, 4_000, mix.patterns(), false);
    let mut vars = vec![std::ptr::null_mut(); program.vars];
    let mut others = vars.clone();
    let [a, b] = medians(
        options,
        [&mut |n| repeat(ours, &program, &mut vars, n), &mut |n| {
            repeat(plain, &program, &mut others, n)
        }],
    );
    figure(mix.name(), 1, a, b, b / a, "x", None)
}

fn repeat(abi: &impl Abi, program: &program::Program, vars: &mut [*mut c_void], n: usize) {
    let times = n.div_ceil(program.ops.len().max(1)).max(1);
    for _ in 0..times {
        for &op in &program.ops {
            execute(abi, op, vars);
        }
    }
}

/// One operation of a mix. Operations of the checker's programs alone do nothing here.
fn execute(abi: &impl Abi, op: program::Op, vars: &mut [*mut c_void]) {
    use program::Op;
    match op {
        Op::Enter => abi.enter_scope(),
        Op::Exit => abi.exit_scope(),
        Op::FunctionEnter(slots) => abi.function_enter(slots),
        Op::FunctionExit => abi.function_exit(),
        Op::Buffer { slot, size } => {
            black_box(abi.get_buffer(slot, size));
        }
        Op::New(var, _) => {
            // SAFETY: a new block that no other code frees.
            unsafe {
                vars[var] = libc::malloc(64);
                abi.register_struct(vars[var]);
            }
        }
        // SAFETY: the program registers only what it holds a count of.
        Op::Register(var) => unsafe { abi.register_struct(vars[var]) },
        Op::Unregister(var) => abi.unregister(vars[var]),
        Op::Acquire(var) => abi.acquire(vars[var]),
        Op::Release(var) => abi.release(vars[var]),
        Op::Assign(from, to) => vars[to] = vars[from],
        Op::NewVec(_) | Op::Push(..) | Op::Promote(_) | Op::Use(_) => {}
        Op::ReleaseUnknown | Op::Mark(_) | Op::Unwind(_) => {}
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{:62} {:>7} {:>10} {:>10} {:>10}  goal",
            "figure", "threads", "ours ns", "plain ns", "value"
        )?;
        for x in &self.figures {
            let goal = x.goal.map_or_else(String::new, |goal| {
                let sign = if x.at_least { ">=" } else { "<=" };
                format!("{sign} {goal} {}", if x.reached() { "reached" } else { "MISSED" })
            });
            let Figure { name, threads, leasehold_ns, plain_ns, value, unit, .. } = x;
            writeln!(
                f,
                "{name:62} {threads:>7} {leasehold_ns:>10.2} {plain_ns:>10.2} {value:>8.2} {unit:2} {goal}"
            )?;
        }
        Ok(())
    }
}
