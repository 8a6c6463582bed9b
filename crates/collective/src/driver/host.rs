//! Collectives between threads of one process, on the CPU.
//!
//! The ranks of a communicator have a rendezvous. A call comes there when its stream's worker runs
//! it, and waits: as in a wait for a timepoint, the worker is the stream's own. The last rank that
//! comes compares the calls, computes for all, and lets them go. It computes in the order of the
//! ranks, so all ranks get the same bits, whoever comes last.
//!
//! # Protocol
//! - A collective call leaves its memory in the rendezvous, and waits for the end of the round. The
//!   round begins to compute with the last rank. From then on nobody leaves before its end.
//! - A send leaves a letter, and waits until it was read. The receiver takes the letter, reads, and
//!   says so. From the taking on the sender does not leave.
//! - A failure is the rendezvous's: all who wait and who come later get it. The first one stays.
//! - The sends of a group are posted before anything is waited for.
//!
//! # Why this is safe
//! A call returns only when nobody uses its memory any more: its round is over, or never began to
//! compute; its letter was read, or was taken back. The lock orders each use after the call's
//! arrival. So a rank's memory is used while the worker is inside the foreign call that declares
//! it, and no longer.

use super::ops::{Call, CollectiveOps, Communicator, Place};
use crate::element::{ElementType, Reduce};
use crate::error::{lost, timeout, unsupported};
use crate::signature::{Kind, Signature, mismatch};
use bytemuck::Zeroable;
use half::{bf16, f16};
use leasehold::backend::panics::caught;
use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::backend::sync::{Arc, Condvar, Mutex, MutexGuard};
use leasehold::backend::{BackendKind, Binding};
use leasehold::{Error, Name, Result};
use std::collections::{HashMap, HashSet, VecDeque};
use std::convert::identity;
use std::ops::{Add, Mul};
use std::sync::Weak;
use std::time::{Duration, Instant};

/// The library for ranks that are threads of one process, on the CPU.
#[derive(Debug, Default)]
pub struct Host;

/// The rendezvous of this process, by id.
static ALL: Mutex<Vec<(Vec<u8>, Weak<Rendezvous>)>> = Mutex::new(Vec::new());
static SERIAL: AtomicU64 = AtomicU64::new(0);

impl CollectiveOps for Host {
    fn name(&self) -> &str {
        "host threads"
    }

    /// A call waits for the other ranks here, so it must not keep others from theirs.
    fn takes_turns(&self) -> bool {
        false
    }

    fn unique_id(&self) -> Result<Vec<u8>> {
        let mut id = std::process::id().to_le_bytes().to_vec();
        id.extend(SERIAL.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        Ok(id)
    }

    fn init(&self, place: &Place) -> Result<Arc<dyn Communicator>> {
        if place.runtime.device().backend != BackendKind::Cpu {
            return Err(unsupported(format!(
                "{} is no CPU; collectives of host threads are for cpu:0",
                place.runtime.device()
            )));
        }
        if !place.id.starts_with(&std::process::id().to_le_bytes()) {
            return Err(unsupported(format!(
                "{} rank {}: collectives on the CPU are for threads of one process, and rank 0 is in another one; use World::threads, or GPUs",
                place.name, place.rank
            )));
        }
        let rendezvous = {
            let mut all = ALL.lock();
            all.retain(|(_, r)| r.strong_count() != 0);
            let found = all.iter().find(|(id, _)| **id == *place.id);
            found.and_then(|(_, r)| r.upgrade()).unwrap_or_else(|| {
                let new = Arc::new(Rendezvous::new(place.name.clone(), place.size));
                all.push((place.id.to_vec(), Arc::downgrade(&new)));
                new
            })
        };
        rendezvous.join(place)?;
        Ok(Arc::new(Part { rendezvous, rank: place.rank, limit: place.limit }))
    }
}

/// A rank's part.
struct Part {
    rendezvous: Arc<Rendezvous>,
    rank: u32,
    limit: Duration,
}

impl Communicator for Part {
    unsafe fn enqueue(&self, _stream: u64, calls: &[Call<'_>]) -> Result<()> {
        let until = Instant::now().checked_add(self.limit);
        let visit =
            Visit { rendezvous: &self.rendezvous, rank: self.rank, until, limit: self.limit };
        // SAFETY: by the contract; the call returns when nobody uses the memory any more.
        unsafe { visit.group(calls) }
    }

    fn abort(&self, cause: Error) {
        self.rendezvous.fail(Failed { by: Some(self.rank), cause });
    }

    fn failure(&self) -> Option<Error> {
        self.rendezvous.state.lock().failed.as_ref().map(|f| f.told(self.rank))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.rendezvous.state.lock().gone.insert(self.rank);
        self.rendezvous.changed.notify_all();
    }
}

/// Memory of a call, whose use the protocol allows to other threads.
#[derive(Clone, Copy)]
struct Memory(*mut u8);

// SAFETY: a number until somebody uses it, which the protocol orders.
unsafe impl Send for Memory {}

impl Memory {
    fn of(binding: Option<Binding>) -> Self {
        Self(binding.map_or(std::ptr::null_mut(), |b| b.addr as usize as *mut u8))
    }

    fn at(self, bytes: u64) -> *mut u8 {
        self.0.wrapping_add(bytes as usize)
    }
}

/// A call that waits in the rendezvous.
struct Arrived {
    signature: Signature,
    src: Memory,
    dst: Memory,
}

/// A send that was not read yet.
struct Letter {
    serial: u64,
    signature: Signature,
    src: Memory,
}

/// Why a rendezvous is over.
#[derive(Clone)]
struct Failed {
    /// The rank that ended it, if one did.
    by: Option<u32>,
    cause: Error,
}

impl Failed {
    /// The error for a rank.
    fn told(&self, rank: u32) -> Error {
        match self.by {
            // A rank that ended it because of a lost one names that one.
            Some(by) if by != rank && !matches!(self.cause, Error::PeerLost { .. }) => {
                lost(by, format!("it has aborted the communicator: {}", self.cause))
            }
            _ => self.cause.clone(),
        }
    }
}

#[derive(Default)]
struct State {
    joined: HashSet<u32>,
    gone: HashSet<u32>,
    failed: Option<Failed>,
    /// The calls of this round, by rank.
    arrived: Vec<Option<Arrived>>,
    /// Rounds that are over, and what the last one gave. It is read before the next one ends.
    rounds: u64,
    outcome: Option<Error>,
    /// The round computes: nobody leaves.
    computing: bool,
    letters: HashMap<(u32, u32), VecDeque<Letter>>,
    /// Letters that are being read.
    taken: HashSet<u64>,
    next: u64,
}

struct Rendezvous {
    name: Name,
    size: u32,
    state: Mutex<State>,
    changed: Condvar,
}

impl Rendezvous {
    fn new(name: Name, size: u32) -> Self {
        let arrived = (0..size).map(|_| None).collect();
        let state = Mutex::new(State { arrived, ..State::default() });
        Self { name, size, state, changed: Condvar::new() }
    }

    fn fail(&self, failed: Failed) {
        self.state.lock().failed.get_or_insert(failed);
        self.changed.notify_all();
    }

    /// Waits until all ranks have joined.
    fn join(&self, place: &Place) -> Result<()> {
        let until = Instant::now().checked_add(place.limit);
        let mut state = self.state.lock();
        if place.size != self.size || place.rank >= self.size {
            return Err(Error::state(format!(
                "{}: rank {} of {} has the id of a communicator of {} ranks; look at the store that gave it",
                self.name, place.rank, place.size, self.size
            )));
        }
        if !state.joined.insert(place.rank) {
            return Err(Error::state(format!(
                "{}: rank {} is taken; give each rank a number of its own",
                self.name, place.rank
            )));
        }
        self.changed.notify_all();
        while state.joined.len() < self.size as usize {
            if let Some(failed) = &state.failed {
                return Err(failed.told(place.rank));
            }
            if self.sleep(&mut state, until) {
                let missing = names((0..self.size).filter(|r| !state.joined.contains(r)));
                let cause = timeout(format!(
                    "{}: {missing} has not joined within {:?}; look at what it does",
                    self.name, place.limit
                ));
                state.failed.get_or_insert(Failed { by: None, cause: cause.clone() });
                self.changed.notify_all();
                return Err(cause);
            }
        }
        Ok(())
    }

    /// Waits for a change. Returns whether the time is over.
    fn sleep(&self, state: &mut MutexGuard<'_, State>, until: Option<Instant>) -> bool {
        match until {
            Some(until) => self.changed.wait_until(state, until).timed_out(),
            None => {
                self.changed.wait(state);
                false
            }
        }
    }
}

/// `rank 1`, or `ranks 1, 2 and 5 more`.
fn names(ranks: impl IntoIterator<Item = u32>) -> String {
    let all: Vec<String> = ranks.into_iter().map(|r| r.to_string()).collect();
    match &all[..] {
        [one] => format!("rank {one}"),
        many if many.len() <= 8 => format!("ranks {}", many.join(", ")),
        many => format!("ranks {} and {} more", many[..8].join(", "), many.len() - 8),
    }
}

/// A group of calls of a rank.
struct Visit<'a> {
    rendezvous: &'a Rendezvous,
    rank: u32,
    until: Option<Instant>,
    limit: Duration,
}

impl Visit<'_> {
    /// Makes the calls.
    ///
    /// # Safety
    /// - The memory of the calls may be used, as their roles say, until this returns.
    unsafe fn group(&self, calls: &[Call<'_>]) -> Result<()> {
        let letters = self.post(calls)?;
        // SAFETY: by the contract.
        let made = calls.iter().try_for_each(|call| unsafe {
            match call.signature.kind {
                Kind::Send { .. } => Ok(()),
                Kind::Recv { from } => self.receive(from, call),
                _ => self.meet(call),
            }
        });
        let failed = made.is_err();
        if let Err(cause) = &made {
            self.rendezvous.fail(Failed { by: None, cause: cause.clone() });
        }
        // Also after a failure: a letter must be taken back.
        let read = letters.iter().map(|(to, letter, s)| self.until_read(*to, *letter, s));
        let read = read.fold(Ok(()), Result::and);
        if failed { made } else { read }
    }

    /// Posts the sends of a group, and returns receivers, letters and calls.
    fn post<'c>(&self, calls: &[Call<'c>]) -> Result<Vec<(u32, u64, &'c Signature)>> {
        let mut state = self.rendezvous.state.lock();
        if let Some(failed) = &state.failed {
            return Err(failed.told(self.rank));
        }
        let mut posted = Vec::new();
        for call in calls {
            let Kind::Send { to } = call.signature.kind else { continue };
            let serial = state.next;
            state.next += 1;
            let letter =
                Letter { serial, signature: call.signature.clone(), src: Memory::of(call.src) };
            state.letters.entry((self.rank, to)).or_default().push_back(letter);
            posted.push((to, serial, call.signature));
        }
        drop(state);
        if !posted.is_empty() {
            self.rendezvous.changed.notify_all();
        }
        Ok(posted)
    }

    /// A failure that this rank has noticed, as everybody's.
    fn fails(&self, mut state: MutexGuard<'_, State>, cause: Error) -> Error {
        let failed = state.failed.get_or_insert(Failed { by: None, cause });
        let told = failed.told(self.rank);
        drop(state);
        self.rendezvous.changed.notify_all();
        told
    }

    /// Why a call waits no longer: a failure, a rank that is `gone`, or ranks that are `late`.
    fn cause(
        &self,
        state: &State,
        call: &Signature,
        gone: Option<u32>,
        late: Option<String>,
    ) -> Option<Error> {
        let failed = state.failed.as_ref().map(|failed| failed.told(self.rank));
        failed.or_else(|| Some(self.lost(gone?, call))).or_else(|| Some(self.late(call, &late?)))
    }

    /// The error of a rank whose call waits for others in vain.
    fn late(&self, signature: &Signature, whom: &str) -> Error {
        let Self { rank, limit, .. } = self;
        let call = signature.numbered(self.rendezvous.name.as_str());
        timeout(format!(
            "{call}: rank {rank} waits in {signature}, and {whom} has not come within {limit:?}; look at what it does, and give each thread that is a rank a stream of its own"
        ))
    }

    fn lost(&self, rank: u32, signature: &Signature) -> Error {
        let (own, name) = (self.rank, &self.rendezvous.name);
        let why = format!(
            "it has dropped {name}, and rank {own} waits for it in {signature}; keep the communicator until all ranks have made their calls"
        );
        lost(rank, why)
    }

    /// Waits until a letter was read, or takes it back.
    fn until_read(&self, to: u32, serial: u64, signature: &Signature) -> Result<()> {
        let rendezvous = self.rendezvous;
        let mut state = rendezvous.state.lock();
        let mut over = false;
        loop {
            let place = state
                .letters
                .get(&(self.rank, to))
                .and_then(|queue| queue.iter().position(|letter| letter.serial == serial));
            let Some(place) = place else {
                if !state.taken.contains(&serial) {
                    // It was read. A difference that the reader has found is everybody's failure.
                    return state.failed.as_ref().map_or(Ok(()), |f| Err(f.told(self.rank)));
                }
                rendezvous.changed.wait(&mut state);
                continue;
            };
            let gone = state.gone.contains(&to).then_some(to);
            if let Some(cause) = self.cause(&state, signature, gone, over.then(|| names([to]))) {
                if let Some(queue) = state.letters.get_mut(&(self.rank, to)) {
                    queue.remove(place);
                }
                return Err(self.fails(state, cause));
            }
            over = rendezvous.sleep(&mut state, self.until);
        }
    }

    /// Reads the next letter of a rank.
    ///
    /// # Safety
    /// - As [`group`](Self::group).
    unsafe fn receive(&self, from: u32, call: &Call<'_>) -> Result<()> {
        let rendezvous = self.rendezvous;
        let mut state = rendezvous.state.lock();
        let mut over = false;
        let letter = loop {
            let key = (from, self.rank);
            let next = |queue: &mut VecDeque<Letter>| queue.pop_front();
            if state.failed.is_none()
                && let Some(letter) = state.letters.get_mut(&key).and_then(next)
            {
                break letter;
            }
            let (gone, late) = (state.gone.contains(&from), over.then(|| names([from])));
            if let Some(cause) = self.cause(&state, call.signature, gone.then_some(from), late) {
                return Err(self.fails(state, cause));
            }
            over = rendezvous.sleep(&mut state, self.until);
        };
        state.taken.insert(letter.serial);
        drop(state);
        let (sent, got) = (&letter.signature, call.signature);
        let same = (sent.element, sent.count) == (got.element, got.count);
        if same {
            let bytes = got.count * got.element.size();
            // SAFETY: the sender waits until the letter is no longer taken; the layers above have
            // checked that both have as many bytes.
            unsafe { copy(letter.src.at(0), Memory::of(call.dst).at(0), bytes) };
        }
        let mut state = rendezvous.state.lock();
        state.taken.remove(&letter.serial);
        if !same {
            let cause = mismatch(rendezvous.name.as_str(), (from, sent), (self.rank, got));
            return Err(self.fails(state, cause));
        }
        drop(state);
        rendezvous.changed.notify_all();
        Ok(())
    }

    /// Waits for the calls of all ranks. The last one computes.
    ///
    /// # Safety
    /// - As [`group`](Self::group).
    unsafe fn meet(&self, call: &Call<'_>) -> Result<()> {
        let (rendezvous, own) = (self.rendezvous, self.rank as usize);
        let mut state = rendezvous.state.lock();
        if let Some(failed) = &state.failed {
            return Err(failed.told(self.rank));
        }
        if state.arrived[own].is_some() {
            let cause = Error::state(format!(
                "{}: two calls of rank {} at a time; this is a defect of the runtime",
                rendezvous.name, self.rank
            ));
            return Err(self.fails(state, cause));
        }
        let round = state.rounds;
        state.arrived[own] = Some(Arrived {
            signature: call.signature.clone(),
            src: Memory::of(call.src),
            dst: Memory::of(call.dst),
        });
        if state.arrived.iter().all(Option::is_some) {
            let calls: Vec<Arrived> = state.arrived.iter_mut().filter_map(Option::take).collect();
            state.computing = true;
            drop(state);
            let first = &calls[0].signature;
            let other = calls.iter().position(|c| !c.signature.matches(first));
            let outcome = match other {
                Some(rank) => Some(mismatch(
                    rendezvous.name.as_str(),
                    (0, first),
                    (rank as u32, &calls[rank].signature),
                )),
                // SAFETY: all ranks are inside their calls until the round is over, and their calls
                // are alike, so the memory has the bytes that were checked for each.
                None => caught(|| unsafe { compute(&calls) }).err().map(Error::state),
            };
            let mut state = rendezvous.state.lock();
            state.computing = false;
            state.rounds += 1;
            state.outcome.clone_from(&outcome);
            if let Some(cause) = &outcome {
                state.failed.get_or_insert(Failed { by: None, cause: cause.clone() });
            }
            drop(state);
            rendezvous.changed.notify_all();
            return outcome.map_or(Ok(()), Err);
        }
        let mut over = false;
        loop {
            if state.rounds > round {
                return state.outcome.clone().map_or(Ok(()), Err);
            }
            if state.computing {
                rendezvous.changed.wait(&mut state);
                continue;
            }
            let absent = |r: &u32| state.arrived[*r as usize].is_none();
            let gone = state.gone.iter().copied().filter(absent).min();
            let late = over.then(|| names((0..rendezvous.size).filter(absent)));
            if let Some(cause) = self.cause(&state, call.signature, gone, late) {
                state.arrived[own] = None;
                return Err(self.fails(state, cause));
            }
            over = rendezvous.sleep(&mut state, self.until);
        }
    }
}

/// Copies bytes, unless they are there already.
///
/// # Safety
/// - Both are valid for so many bytes, of which nobody else writes any meanwhile.
unsafe fn copy(src: *const u8, dst: *mut u8, bytes: u64) {
    if bytes != 0 && src != dst.cast_const() {
        // SAFETY: by the contract.
        unsafe { std::ptr::copy(src, dst, bytes as usize) };
    }
}

/// Makes a call of all ranks, whose signatures are alike.
///
/// # Safety
/// - The memory of each is what [`Call`] says, and nobody else uses it meanwhile.
unsafe fn compute(calls: &[Arrived]) {
    let Signature { kind, element, count, .. } = calls[0].signature;
    if count == 0 {
        return;
    }
    let bytes = count * element.size();
    let src: Vec<Memory> = calls.iter().map(|c| c.src).collect();
    let dst: Vec<Memory> = calls.iter().map(|c| c.dst).collect();
    let every = || std::iter::zip(0u64.., &src);
    // SAFETY: by the contract, for all of them.
    unsafe {
        match kind {
            Kind::AllReduce(how) => reduce(element, how, &src, &dst, 0, count),
            Kind::Reduce { reduce: how, root } => {
                let root = root as usize;
                reduce(element, how, &src, &dst[root..=root], 0, count);
            }
            Kind::ReduceScatter(how) => {
                for part in 0..calls.len() {
                    reduce(element, how, &src, &dst[part..=part], part as u64 * bytes, count);
                }
            }
            Kind::AllGather => {
                for (rank, src) in every() {
                    dst.iter().for_each(|dst| copy(src.at(0), dst.at(rank * bytes), bytes));
                }
            }
            Kind::Broadcast { root } => {
                let src = src[root as usize];
                for (rank, dst) in dst.iter().enumerate() {
                    if rank != root as usize {
                        copy(src.at(0), dst.at(0), bytes);
                    }
                }
            }
            Kind::AllToAll => {
                for (from, src) in every() {
                    for (to, dst) in std::iter::zip(0u64.., &dst) {
                        copy(src.at(to * bytes), dst.at(from * bytes), bytes);
                    }
                }
            }
            Kind::Barrier | Kind::Send { .. } | Kind::Recv { .. } => {}
        }
    }
}

/// Reduces `count` elements, which lie `offset` bytes from the sources' beginnings.
///
/// # Safety
/// - Sources and destinations are valid for them. A destination may be the place in a source that
///   its elements come from, and overlaps no other memory.
unsafe fn reduce(
    element: ElementType,
    how: Reduce,
    src: &[Memory],
    dst: &[Memory],
    offset: u64,
    count: u64,
) {
    macro_rules! by_type {
        ($($name:ident = $rust:ty,)*) => {
            // SAFETY: by the contract.
            unsafe {
                match element {
                    $(ElementType::$name => reduce_as::<$rust>(how, src, dst, offset, count),)*
                }
            }
        };
    }
    by_type! {
        I8 = i8,
        U8 = u8,
        I16 = i16,
        U16 = u16,
        I32 = i32,
        U32 = u32,
        I64 = i64,
        U64 = u64,
        F16 = f16,
        Bf16 = bf16,
        F32 = f32,
        F64 = f64,
    }
}

/// Elements that are reduced at a time.
const PIECE: usize = 1024;

/// As [`reduce`], for one type.
///
/// # Safety
/// - As [`reduce`].
unsafe fn reduce_as<T: Number>(
    how: Reduce,
    src: &[Memory],
    dst: &[Memory],
    offset: u64,
    count: u64,
) {
    let (mut piece, mut sums) = ([T::zeroed(); PIECE], [T::Wide::zeroed(); PIECE]);
    let size = size_of::<T>() as u64;
    let mut done = 0;
    while done < count {
        let n = (count - done).min(PIECE as u64) as usize;
        let bytes = n as u64 * size;
        for (rank, src) in src.iter().enumerate() {
            // SAFETY: by the contract; the bytes of any number are a number.
            unsafe {
                copy(src.at(offset + done * size), piece.as_mut_ptr().cast::<u8>(), bytes);
            }
            for (sum, x) in std::iter::zip(&mut sums[..n], &piece) {
                *sum = if rank == 0 { x.wide() } else { T::join(how, *sum, x.wide()) };
            }
        }
        for (x, sum) in std::iter::zip(&mut piece[..n], &sums) {
            *x = T::narrow(match how {
                Reduce::Average => T::part(*sum, src.len()),
                _ => *sum,
            });
        }
        for dst in dst {
            // SAFETY: by the contract: what is overwritten was read.
            unsafe { copy(piece.as_ptr().cast::<u8>(), dst.at(done * size), bytes) };
        }
        done += n as u64;
    }
}

/// A number that is reduced. Numbers of 16 bits are reduced in 32 and rounded once.
trait Number: bytemuck::Pod {
    type Wide: bytemuck::Pod;
    fn wide(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    /// Joins the next rank's number to those before it.
    fn join(how: Reduce, sum: Self::Wide, x: Self::Wide) -> Self::Wide;
    fn part(sum: Self::Wide, ranks: usize) -> Self::Wide;
}

macro_rules! numbers {
    ($($rust:ty as $wide:ty: $to:expr, $from:expr, $add:expr, $multiply:expr, $part:expr;)*) => {
        $(impl Number for $rust {
            type Wide = $wide;

            fn wide(self) -> $wide {
                $to(self)
            }

            fn narrow(wide: $wide) -> Self {
                $from(wide)
            }

            fn join(how: Reduce, sum: $wide, x: $wide) -> $wide {
                // A NaN has no order, not even to itself. Of equal values the first stays: +0
                // and -0 are equal.
                let takes = |x_is| x_is || sum.partial_cmp(&sum).is_none();
                match how {
                    Reduce::Sum | Reduce::Average => $add(sum, x),
                    Reduce::Product => $multiply(sum, x),
                    Reduce::Least => if takes(x < sum) { x } else { sum },
                    Reduce::Largest => if takes(x > sum) { x } else { sum },
                }
            }

            fn part(sum: $wide, ranks: usize) -> $wide {
                $part(sum, ranks)
            }
        })*
    };
}

macro_rules! integers {
    ($($rust:ty)*) => {
        numbers! { $(
            $rust as $rust:
                identity, identity, <$rust>::wrapping_add, <$rust>::wrapping_mul, |sum, _| sum;
        )* }
    };
}
integers! { i8 u8 i16 u16 i32 u32 i64 u64 }

numbers! {
    f16 as f32: f16::to_f32, f16::from_f32, f32::add, f32::mul, |sum, n| sum / n as f32;
    bf16 as f32: bf16::to_f32, bf16::from_f32, f32::add, f32::mul, |sum, n| sum / n as f32;
    f32 as f32: identity, identity, f32::add, f32::mul, |sum, n| sum / n as f32;
    f64 as f64: identity, identity, f64::add, f64::mul, |sum, n| sum / n as f64;
}
