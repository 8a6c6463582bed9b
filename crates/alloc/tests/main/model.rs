//! Random operations against a naive model: live blocks are disjoint, aligned and backed; memory
//! that a stream may still use is lent to that stream only, or to one that is ordered after it; the
//! numbers are what the model counts; in the end everything goes back.

use leasehold_alloc::{Allocator, AllocatorConfig, Buffer, CrossStream, Layout, On, Policy};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Error, Lease, PackedTimepoint, Result, Timeline, TimelineId, TimelineSource, Timepoint,
};
use leasehold_sim::memory::FakeBacking;
use leasehold_sim::memory::{VirtualStream, pass};
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// A small, fast generator: the tests are reproducible from their seed.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n.max(1)
    }

    fn size(&mut self) -> u64 {
        match self.below(10) {
            0 => self.below(4),
            1..5 => 1 + self.below(4096),
            5..7 => 1 + self.below(64 << 10),
            7..9 => 1 + self.below(2 << 20),
            _ => 1 + self.below(12 << 20),
        }
    }
}

fn over(s: PackedTimepoint) -> bool {
    s.timepoint().is_none_or(|p| p.timeline().completed() >= p.value())
}

const STREAMS: usize = 3;
const MIB: u64 = 1 << 20;
type Clock = [u64; STREAMS];

/// The happens-before order: a vector clock per stream, moved by every wait (the allocator's own
/// too) and every submission.
#[derive(Default)]
struct Order {
    timelines: Vec<TimelineId>,
    now: [Clock; STREAMS],
    /// The clock of each submission that is not over yet.
    at: [VecDeque<(u64, Clock)>; STREAMS],
}

impl Order {
    /// The stream of a timeline; none for one that is gone, whose work is over.
    fn of(&self, timeline: TimelineId) -> Option<usize> {
        self.timelines.iter().position(|&l| l == timeline)
    }

    /// A new stream takes the place of an idle one.
    fn replaced(&mut self, t: usize, timeline: TimelineId) {
        self.timelines[t] = timeline;
        self.at[t].clear();
        self.now[t] = [0; STREAMS];
        self.now.iter_mut().for_each(|clock| clock[t] = 0);
        self.at.iter_mut().flatten().for_each(|e| e.1[t] = 0);
    }

    fn submitted(&mut self, p: Timepoint) {
        let Some(t) = self.of(p.timeline_id()) else { return };
        self.now[t][t] = p.value();
        let over = p.timeline().completed();
        while self.at[t].front().is_some_and(|f| f.0 <= over) {
            self.at[t].pop_front();
        }
        self.at[t].push_back((p.value(), self.now[t]));
    }

    fn waited(&mut self, timeline: TimelineId, on: Timepoint) {
        let (Some(t), Some(u)) = (self.of(timeline), self.of(on.timeline_id())) else { return };
        let known = self.clock(on);
        for (mine, theirs) in self.now[t].iter_mut().zip(known) {
            *mine = (*mine).max(theirs);
        }
        self.now[t][u] = self.now[t][u].max(on.value());
    }

    /// The clock that a timepoint comes after; zeros for a timepoint that is over.
    fn clock(&self, p: Timepoint) -> Clock {
        let list = self.of(p.timeline_id()).map(|t| &self.at[t]);
        list.into_iter().flatten().rev().find(|e| e.0 <= p.value()).map_or([0; STREAMS], |e| e.1)
    }

    /// Whether whoever waits for `r` has thereby waited for `s`.
    fn covers(&self, r: PackedTimepoint, s: PackedTimepoint) -> bool {
        match (s.timepoint(), r.timepoint()) {
            (None, _) => true,
            (_, None) => false,
            (Some(s), Some(r)) if s.timeline_id() == r.timeline_id() => s.value() <= r.value(),
            (Some(s), Some(r)) => {
                self.of(s.timeline_id()).is_none_or(|u| self.clock(r)[u] >= s.value())
            }
        }
    }

    /// Whether what comes next on `timeline` comes after `s`.
    fn follows(&self, timeline: TimelineId, s: PackedTimepoint) -> bool {
        let (Some(t), Some(u)) = (self.of(timeline), self.of(s.timeline_id())) else { return true };
        t == u || s.is_never() || self.now[t][u] >= s.value()
    }
}

/// A virtual stream whose order the model knows.
struct Stream {
    inner: VirtualStream,
    order: Arc<Mutex<Order>>,
    /// Waits of the host for it end too early.
    late: bool,
}

impl Stream {
    fn submit(&self) -> Result<Timepoint> {
        let p = self.inner.submit()?;
        self.order.lock().submitted(p);
        Ok(p)
    }
}

// SAFETY: nothing that is submitted touches memory.
unsafe impl TimelineSource for Stream {
    fn timeline(&self) -> &'static Timeline {
        self.inner.timeline()
    }
    fn signal(&self) -> Result<u64> {
        self.inner.signal()
    }
    fn refresh(&self) -> Result<u64> {
        self.inner.refresh()
    }
    fn wait(&self, on: Timepoint) -> Result<()> {
        self.inner.wait(on)?;
        self.order.lock().waited(self.timeline().id(), on);
        Ok(())
    }
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        if self.late && timeout.is_some() {
            return Err(Error::Timeout("the stream is late".into()));
        }
        self.inner.wait_host(value, timeout)
    }
}

struct Model {
    allocator: Allocator,
    fake: FakeBacking,
    streams: Vec<Stream>,
    order: Arc<Mutex<Order>>,
    live: Vec<(Lease<Buffer>, Vec<PackedTimepoint>)>,
    /// The memory of live blocks.
    by_memory: BTreeMap<u64, u64>,
    /// Freed memory with the uses that may go on.
    pending: Vec<(u64, u64, Vec<PackedTimepoint>)>,
    bytes: u64,
    /// Streams come and go, and for a while only some of them are used: so do lists.
    churn: bool,
    active: u64,
    /// Another thread looks in, allocates and frees now and then, so that large blocks lie in
    /// thread caches too; and large sizes come again.
    visits: bool,
}

impl Model {
    fn new(fake: FakeBacking, config: AllocatorConfig) -> Self {
        let allocator = Allocator::new(Box::new(fake.clone()), config).expect("an allocator");
        let order = Arc::new(Mutex::new(Order::default()));
        let stream = |_| {
            let inner = VirtualStream::new().expect("a timeline");
            Stream { inner, order: order.clone(), late: false }
        };
        let streams: Vec<_> = (0..STREAMS).map(stream).collect();
        order.lock().timelines = streams.iter().map(|s| s.timeline().id()).collect();
        let (live, by_memory, pending) = (Vec::new(), BTreeMap::new(), Vec::new());
        let active = STREAMS as u64;
        let (bytes, churn, visits) = (0, false, false);
        Self {
            allocator,
            fake,
            streams,
            order,
            live,
            by_memory,
            pending,
            bytes,
            churn,
            active,
            visits,
        }
    }

    fn alloc(&mut self, rng: &mut Rng) {
        let align = if rng.below(8) == 0 { 1 << rng.below(17) } else { 256 };
        let mut size = rng.size();
        if self.visits && size > 64 << 10 {
            size = size.next_multiple_of(MIB);
        }
        let layout = Layout { size, align };
        let t = rng.below(self.active) as usize;
        let on = On::new(&self.streams[t]);
        let elsewhere = self.visits && rng.below(40) == 0;
        let lent = match elsewhere {
            true => std::thread::scope(|s| {
                s.spawn(|| self.allocator.alloc(layout, on)).join().expect("an allocation")
            }),
            false => self.allocator.alloc(layout, on),
        };
        let buffer = match lent {
            Ok(buffer) => buffer,
            Err(Error::OutOfMemory(_) | Error::OverBudget { .. }) => return,
            Err(e) => panic!("{e}"),
        };
        assert_eq!(buffer.len(), layout.size);
        if layout.size == 0 {
            assert_eq!(buffer.addr(), 0);
            self.live.push((buffer, Vec::new()));
            return;
        }
        let (from, to) = (buffer.addr(), buffer.addr() + layout.size);
        assert_eq!(from % align.max(256), 0, "{layout:?} at {from:#x}");
        assert!(self.fake.is_backed(from, layout.size), "{from:#x}..{to:#x} is not backed");
        // No two live blocks have a byte of memory in common, at whatever addresses they lie.
        let memory = self.fake.memory(from, layout.size);
        for &(m, len) in &memory {
            if let Some((at, other)) = self.by_memory.range(..m + len).next_back() {
                assert!(
                    at + other <= m,
                    "{from:#x}..{to:#x} has memory of a live block at {at:#x}+{other:#x}"
                );
            }
        }
        let mut seen = vec![buffer.write_timepoint()];
        buffer.for_each_read(|s| seen.push(s));
        let order = self.order.lock();
        for (a, b, timepoints) in &self.pending {
            if memory.iter().any(|&(m, len)| *a < m + len && m < *b) {
                for s in timepoints.iter().filter(|&&s| !over(s)) {
                    assert!(
                        order.follows(on.timeline.id(), *s),
                        "{from:#x}..{to:#x} is lent while {s:?} may use it"
                    );
                    // A later use stands for every use that it was made to wait for.
                    let told = seen.iter().any(|&r| order.covers(r, *s));
                    assert!(told, "the record of {from:#x}..{to:#x} forgets {s:?}: {seen:?}");
                }
            }
        }
        drop(order);
        // From now on the new holder's record guards its range.
        for &(m, len) in &memory {
            let mut rest = Vec::new();
            self.pending.retain(|(a, b, timepoints)| {
                let apart = *b <= m || m + len <= *a;
                if !apart {
                    let parts = [(*a, m), (m + len, *b)].into_iter().filter(|r| r.0 < r.1);
                    rest.extend(parts.map(|r| (r.0, r.1, timepoints.clone())));
                }
                apart
            });
            self.pending.append(&mut rest);
            self.by_memory.insert(m, len);
        }
        // The timepoints that the new buffer inherits still guard the range when it is freed.
        seen.retain(|s| !over(*s));
        self.bytes += layout.size;
        self.live.push((buffer, seen));
    }

    fn free(&mut self, rng: &mut Rng) {
        if self.live.is_empty() {
            return;
        }
        let at = rng.below(self.live.len() as u64) as usize;
        let (buffer, timepoints) = self.live.swap_remove(at);
        let (from, len) = (buffer.addr(), buffer.len());
        if len > 0 {
            self.bytes -= len;
            self.pending.retain(|p| p.2.iter().any(|&s| !over(s)));
            for (m, len) in self.fake.memory(from, len) {
                self.by_memory.remove(&m);
                if timepoints.iter().any(|&s| !over(s)) {
                    self.pending.push((m, m + len, timepoints.clone()));
                }
            }
        }
        let handle = buffer.handle();
        if self.visits && rng.below(40) == 0 {
            std::thread::scope(|s| s.spawn(move || drop(buffer)).join().expect("a drop"));
        } else {
            drop(buffer);
        }
        assert!(!self.allocator.is_alive(handle));
        assert!(self.allocator.lease(handle).is_err());
    }

    fn use_one(&mut self, rng: &mut Rng) {
        if self.live.is_empty() {
            return;
        }
        let at = rng.below(self.live.len() as u64) as usize;
        let t = rng.below(self.active) as usize;
        let timeline = self.streams[t].timeline();
        let (buffer, timepoints) = &mut self.live[at];
        let kind = rng.below(3);
        // The runtime lets a write wait for all that is recorded, and a read for the last write.
        // Then it submits, then it marks.
        if kind < 2 {
            let mut before = vec![buffer.write_timepoint()];
            if kind == 0 {
                buffer.for_each_read(|s| before.push(s));
            }
            for p in before.iter().filter(|s| !over(**s)).filter_map(|s| s.timepoint()) {
                self.streams[t].wait(p).expect("a virtual wait");
            }
        }
        let point = self.streams[t].submit().expect("a value");
        match kind {
            0 => {
                // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too
                // early.
                unsafe { buffer.mark_write(point) };
                let order = self.order.lock();
                timepoints.retain(|&s| !order.follows(timeline.id(), s));
            }
            // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too
            // early.
            1 => unsafe { buffer.mark_read(point) },
            _ => buffer.used_on(point),
        }
        timepoints.push(point.into());
    }

    /// Another stream takes the place of one, whose work is over then; what it allocated lives on.
    fn replace(&mut self, rng: &mut Rng) {
        let t = rng.below(STREAMS as u64) as usize;
        let inner = VirtualStream::new().expect("a timeline");
        let old = std::mem::replace(&mut self.streams[t].inner, inner);
        pass(old.timeline().now());
        self.order.lock().replaced(t, self.streams[t].timeline().id());
    }

    fn step(&mut self, rng: &mut Rng) {
        match rng.below(100) {
            0..40 => self.alloc(rng),
            40..75 => {
                if self.visits && rng.below(40) == 0 {
                    let seen = std::thread::scope(|s| {
                        s.spawn(|| self.allocator.stats().live).join().expect("a look")
                    });
                    assert_eq!(seen, self.live.len() as u64);
                }
                self.free(rng);
            }
            75..93 => self.use_one(rng),
            93..98 => {
                let timeline = self.streams[rng.below(STREAMS as u64) as usize].timeline();
                let (done, all) = (timeline.completed(), timeline.submitted());
                pass(timeline.at(done + rng.below(all - done + 1)));
            }
            98 => self.allocator.drain(),
            _ if self.churn && rng.below(8) == 0 => self.replace(rng),
            _ => {
                self.allocator.trim(rng.below(64 << 20)).expect("a trim on a healthy device");
            }
        }
        let stats = self.allocator.stats();
        assert_eq!((stats.live, stats.live_bytes), (self.live.len() as u64, self.bytes));
        assert!(stats.reserved <= stats.limit && stats.reserved >= self.fake.used());
    }

    fn check(&self) {
        self.allocator.check().expect("the invariants");
        assert_eq!(self.fake.violations(), Vec::<String>::new());
        assert_eq!(self.allocator.stats().reserved, self.fake.used());
    }

    /// I11: everything dropped and the streams done, nothing stays with the driver.
    fn end(mut self) {
        self.live.clear();
        for s in &self.streams {
            pass(s.timeline().now());
        }
        self.allocator.trim(0).expect("a trim on a healthy device");
        self.check();
        let stats = self.allocator.stats();
        assert_eq!(stats.reserved, 0, "{stats:?}");
        let fake = self.fake.clone();
        drop(self);
        assert_eq!(fake.outstanding(), (0, 0, 0, 0));
        assert_eq!(fake.violations(), Vec::<String>::new());
    }
}

/// Backings, budgets, policies, streams that stay or come and go, one thread or two, streams that
/// the host catches up with and late ones.
const KINDS: u64 = 288;

fn run(seed: u64, steps: usize, kind: u64) {
    let mut rng = Rng(seed | 1);
    let physical = if kind & 1 == 0 { 1 << 30 } else { 48 << 20 };
    let fake =
        if kind & 2 == 0 { FakeBacking::new(physical) } else { FakeBacking::segments(physical) };
    let config = AllocatorConfig {
        policy: [Policy::Balanced, Policy::Fastest, Policy::Compact][(kind / 4 % 3) as usize],
        cross_stream: [CrossStream::IfReady, CrossStream::Never, CrossStream::InsertWait]
            [(kind / 12 % 3) as usize],
        budget: if kind & 1 == 0 { u64::MAX } else { 40 << 20 },
        ..AllocatorConfig::default()
    };
    let mut model = Model::new(fake, config);
    model.churn = kind / 36 % 2 == 1;
    model.visits = kind / 72 % 2 == 1;
    model.streams.iter_mut().for_each(|s| s.late = kind / 144 % 2 == 1);
    for i in 0..steps {
        if model.churn && i % 3000 == 2999 {
            model.active = 1 + rng.below(2 * STREAMS as u64).saturating_sub(STREAMS as u64);
        }
        model.step(&mut rng);
        if i % 1000 == 999 {
            model.check();
        }
    }
    model.end();
}

/// `LEASEHOLD_MODEL_CASES=20000 cargo test --release -p leasehold-alloc random_operations`
/// for a long look.
fn cases() -> u32 {
    std::env::var("LEASEHOLD_MODEL_CASES").ok().and_then(|s| s.parse().ok()).unwrap_or(72)
}

proptest! {
    // Other seeds each time; a failure names its seed, which then becomes a test of its own below.
    #![proptest_config(ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_operations_agree_with_the_model(seed in any::<u64>().no_shrink(), kind in (0..KINDS).no_shrink()) {
        run(seed, 9000, kind);
    }
}

/// The last 202 bytes of a block lay beyond what its holder had asked for, so the model, which knew
/// requests only, took them for memory that timeline 2 still used, although the holder's timeline
/// had waited for that use and its write stood for it.
#[test]
fn slack_is_guarded_by_the_write_that_waited_for_its_former_use() {
    run(8232327894336975388, 1500, 28);
}

/// The long run: `ci/sanitize.sh fuzz-alloc`, with a hundred million operations.
#[test]
fn long_fuzz() {
    let steps = std::env::var("LEASEHOLD_FUZZ_STEPS")
        .ok()
        .and_then(|s| s.parse::<usize>().ok())
        .unwrap_or(288_000);
    for kind in 0..KINDS {
        run(0x1234_5678_9ABC_DEF1 ^ (kind << 20), steps / KINDS as usize, kind);
    }
}

/// I13: the same operations give the same addresses.
#[test]
fn equal_operations_give_equal_addresses() {
    let play = || {
        let b = crate::Bench::new(1 << 30);
        let mut rng = Rng(77);
        let mut held: Vec<Lease<Buffer>> = Vec::new();
        let mut addrs = Vec::new();
        for _ in 0..3000 {
            if rng.below(5) < 3 {
                held.push(b.take(rng.size()));
                addrs.extend(held.last().map(|h| h.addr()));
            } else if !held.is_empty() {
                let at = rng.below(held.len() as u64) as usize;
                drop(held.swap_remove(at));
            }
        }
        addrs
    };
    assert_eq!(play(), play());
}
