//! Wrong libraries of collectives and a wrong store: those of the CPU's ranks, with one defect.

use leasehold::backend::sync::Mutex;
use leasehold::backend::{Backend, Binding, KernelDesc};
use leasehold::{DeviceId, Error, Result, Runtime};
use leasehold_collective::driver::{Call, CollectiveOps, Communicator, Derived, Host, Place};
use leasehold_collective::{Kind, Presence, Reduce, Signature, Store, ThreadStore, World};
use leasehold_conformance::{Factory, Filter, Ranks, Report, TestKernel, Wrap, run};
use leasehold_cpu::CpuBackend;
use std::collections::HashSet;
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Defect {
    None,
    /// The last rank gives zeros.
    ForgetsLast,
    /// Parts that are gathered come in the wrong order.
    Rotates,
    /// The last element of each call is left as it is.
    CutsCounts,
    /// Sums are products.
    Multiplies,
    /// The calls of a group wait for each other.
    SplitsGroups,
    /// A call of a graph is made in its first launch only.
    Once,
    /// Calls are over before they are made.
    Late,
    /// Barriers hold nobody.
    NoBarriers,
    /// Calls without elements are refused.
    RefusesEmpty,
    /// Communicators that come from others have their ranks in the wrong order.
    Reverses,
    /// All communicators are one.
    SharesIds,
    /// A communicator is there before the other ranks have come.
    ComesAlone,
    /// An abort ends nothing.
    IgnoresAborts,
    /// Calls that fail are over without an error.
    LosesErrors,
    /// The store tells a rank its own value for another one's.
    Deaf,
    /// Reductions of 16 bits are not made.
    NoShort,
}

struct Library {
    defect: Defect,
    /// The first id of a run of a case.
    first: OnceLock<Vec<u8>>,
}

impl CollectiveOps for Library {
    fn name(&self) -> &str {
        "wrong"
    }

    fn takes_turns(&self) -> bool {
        false
    }

    fn unique_id(&self) -> Result<Vec<u8>> {
        let id = Host.unique_id()?;
        // Within a run: a communicator of another run may not be given back yet.
        Ok(match self.defect {
            Defect::SharesIds => self.first.get_or_init(|| id).clone(),
            _ => id,
        })
    }

    fn init(&self, place: &Place) -> Result<Arc<dyn Communicator>> {
        let inner = match self.defect {
            Defect::ComesAlone => {
                let id = Host.unique_id()?.into();
                Host.init(&Place { size: 1, rank: 0, id, ..place.clone() })?
            }
            _ => Host.init(place)?,
        };
        let (rank, size) = (place.rank, place.size);
        let (made, threads) = (Mutex::default(), Mutex::default());
        // Late calls need mapped memory. What they keep is never given back.
        let kept = (self.defect == Defect::Late).then(|| ManuallyDrop::new(place.runtime.clone()));
        Ok(Arc::new(Part { defect: self.defect, inner, rank, size, made, threads, _kept: kept }))
    }

    fn derive(
        &self,
        _: &dyn Communicator,
        _: Derived,
        place: Option<&Place>,
    ) -> Result<Option<Arc<dyn Communicator>>> {
        let Some(place) = place else { return Ok(None) };
        let mut place = place.clone();
        if self.defect == Defect::Reverses {
            place.rank = place.size - 1 - place.rank;
        }
        self.init(&place).map(Some)
    }
}

struct Part {
    defect: Defect,
    inner: Arc<dyn Communicator>,
    rank: u32,
    size: u32,
    /// The recorded calls that were made.
    made: Mutex<HashSet<u64>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    _kept: Option<ManuallyDrop<Runtime>>,
}

/// Clears a call's memory.
fn zero(binding: Binding) {
    // SAFETY: the memory is the CPU's, and the call may use it now.
    unsafe { (binding.addr as *mut u8).write_bytes(0, binding.len as usize) };
}

impl Part {
    /// # Safety
    /// - As [`Communicator::enqueue`].
    unsafe fn call(&self, stream: u64, calls: &[Call<'_>]) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.inner.enqueue(stream, calls) }
    }
}

impl Communicator for Part {
    unsafe fn enqueue(&self, stream: u64, calls: &[Call<'_>]) -> Result<()> {
        let first = calls[0];
        let signatures: Vec<Signature> = calls.iter().map(|c| c.signature.clone()).collect();
        let changed = |change: &dyn Fn(&mut Signature)| -> Vec<Signature> {
            let mut all = signatures.clone();
            all.iter_mut().for_each(change);
            all
        };
        let with = |all: &[Signature]| -> Result<()> {
            let calls: Vec<_> =
                calls.iter().zip(all).map(|(c, signature)| Call { signature, ..*c }).collect();
            // SAFETY: the caller's; the calls use no more memory than theirs.
            unsafe { self.call(stream, &calls) }
        };
        match self.defect {
            Defect::ForgetsLast if self.rank == self.size - 1 => {
                let nothing = vec![0u64; 1 << 12];
                let calls: Vec<_> = calls
                    .iter()
                    .map(|c| {
                        let addr = nothing.as_ptr() as u64;
                        Call { src: c.src.map(|src| Binding { addr, ..src }), ..*c }
                    })
                    .collect();
                // SAFETY: the caller's; the suite's memory is not larger than the other one.
                unsafe { self.call(stream, &calls) }
            }
            Defect::Rotates => {
                with(&signatures)?;
                if let (Kind::AllGather | Kind::AllToAll, Some(dst)) =
                    (first.signature.kind, first.dst)
                {
                    // SAFETY: the memory is the CPU's, and the call that wrote it is over.
                    let all = unsafe {
                        std::slice::from_raw_parts_mut(dst.addr as *mut u8, dst.len as usize)
                    };
                    all.rotate_left(dst.len as usize / self.size as usize);
                }
                Ok(())
            }
            Defect::CutsCounts => with(&changed(&|s| s.count = s.count.saturating_sub(1))),
            Defect::Multiplies => with(&changed(&|s| match &mut s.kind {
                Kind::AllReduce(reduce)
                | Kind::ReduceScatter(reduce)
                | Kind::Reduce { reduce, .. }
                    if *reduce == Reduce::Sum =>
                {
                    *reduce = Reduce::Product;
                }
                _ => {}
            })),
            Defect::SplitsGroups => calls.iter().try_for_each(|call| {
                // SAFETY: the caller's.
                unsafe { self.call(stream, &[*call]) }
            }),
            Defect::Once
                if first.signature.captured && !self.made.lock().insert(first.signature.seq) =>
            {
                Ok(())
            }
            Defect::Late => {
                let (inner, calls) = (self.inner.clone(), {
                    let own = calls.iter().map(|c| (c.signature.clone(), c.src, c.dst));
                    own.collect::<Vec<_>>()
                });
                let before = self.threads.lock().pop();
                let thread = std::thread::spawn(move || {
                    // One after the other.
                    if let Some(before) = before {
                        let _ = before.join();
                    }
                    std::thread::sleep(Duration::from_millis(20));
                    let calls: Vec<_> = calls
                        .iter()
                        .map(|(signature, src, dst)| Call { signature, src: *src, dst: *dst })
                        .collect();
                    // SAFETY: the memory stays mapped, because the part keeps the runtime for ever.
                    let _ = unsafe { inner.enqueue(stream, &calls) };
                });
                self.threads.lock().push(thread);
                Ok(())
            }
            Defect::NoBarriers if first.signature.kind == Kind::Barrier => Ok(()),
            Defect::RefusesEmpty
                if first.signature.count == 0 && first.signature.kind != Kind::Barrier =>
            {
                Err(Error::invalid("a call of nothing"))
            }
            Defect::NoShort => {
                with(&signatures)?;
                if first.signature.element.size() == 2 && !first.signature.element.is_float() {
                    first.dst.into_iter().for_each(zero);
                }
                Ok(())
            }
            Defect::LosesErrors => {
                let _ = with(&signatures);
                Ok(())
            }
            _ => with(&signatures),
        }
    }

    fn abort(&self, cause: Error) {
        if self.defect != Defect::IgnoresAborts {
            self.inner.abort(cause);
        }
    }

    fn failure(&self) -> Option<Error> {
        self.inner.failure()
    }

    fn destroy(&self) -> Result<()> {
        std::mem::take(&mut *self.threads.lock()).into_iter().for_each(|t| drop(t.join()));
        self.inner.destroy()
    }
}

/// A store that tells a rank what it has said itself.
#[derive(Debug)]
struct Deaf(ThreadStore, u32);

impl Store for Deaf {
    fn place(&self) -> String {
        self.0.place()
    }
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value)
    }
    fn get(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        match key.rsplit_once('/') {
            Some((subject, _)) if subject.contains("/stop/") || subject.contains("/each/") => {
                self.0.get(&format!("{subject}/{}", self.1), limit)
            }
            _ => self.0.get(key, limit),
        }
    }
    fn add(&self, key: &str, by: i64) -> Result<i64> {
        self.0.add(key, by)
    }
    fn remove(&self, key: &str) -> Result<()> {
        self.0.remove(key)
    }
    fn enter(&self, rank: u32) -> Result<()> {
        self.0.enter(rank)
    }
    fn presence(&self, rank: u32) -> Result<Presence> {
        self.0.presence(rank)
    }
}

struct Wrong(Defect);

impl Factory for Wrong {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(CpuBackend::new()))
    }
    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_cpu())
    }
    fn ranks(&self, most: u32) -> Option<Result<Ranks>> {
        let store = ThreadStore::new();
        let place = |rank| {
            let world = match self.0 {
                Defect::Deaf => World::with_store(rank, most, Deaf(store.share(), rank))?,
                _ => World::with_store(rank, most, store.share())?,
            };
            Ok((world, DeviceId::cpu(0)))
        };
        let places: Result<Vec<_>> = (0..most).map(place).collect();
        Some(places.and_then(|places| {
            let library = Arc::new(Library { defect: self.0, first: OnceLock::new() });
            Ok(Ranks { backend: self.backend()?, places, library })
        }))
    }
}

fn tried(defect: Defect, cases: &[u16]) -> Report {
    let filter = Filter {
        wrap: Some(Wrap::Plain),
        timeout: Duration::from_millis(500),
        limit: Duration::from_secs(20),
        ..Filter::only(cases)
    };
    run(Wrong(defect), &filter)
}

/// Checks that exactly the cases `wrong` of `cases` fail under the defect, and none without it.
#[track_caller]
fn finds(defect: Defect, cases: &[u16], wrong: &[u16]) {
    super::quiet();
    let report = tried(defect, cases);
    assert_eq!(report.failed(), wrong, "{defect:?}\n{report}");
    assert_eq!(report.skipped(), 0, "{defect:?}\n{report}");
    let right = tried(Defect::None, wrong);
    assert!(right.failed().is_empty() && right.skipped() == 0, "without {defect:?}\n{right}");
}

#[test]
fn parts_of_ranks_that_are_lost_or_mixed_up_are_found() {
    finds(
        Defect::ForgetsLast,
        &[162, 163, 164, 165, 166, 167, 168, 169, 170, 172, 173, 178, 179, 185, 200],
        &[162, 163, 164, 165, 166, 167, 168, 169, 170, 172, 173, 178, 179, 185, 200],
    );
    finds(Defect::Rotates, &[162, 164, 165, 168, 170], &[164, 165, 170]);
    finds(Defect::Reverses, &[162, 187, 188, 208], &[187, 188]);
}

#[test]
fn wrong_counts_and_reductions_are_found() {
    finds(Defect::CutsCounts, &[171, 174, 175, 177, 184, 191], &[171, 174, 175, 177, 184, 191]);
    finds(Defect::Multiplies, &[162, 168, 175, 176, 190, 208], &[162, 175, 176, 190, 208]);
    finds(Defect::NoShort, &[173, 174], &[173, 174]);
    finds(Defect::RefusesEmpty, &[162, 177], &[177]);
}

#[test]
fn groups_whose_calls_wait_for_each_other_are_found() {
    finds(Defect::SplitsGroups, &[171, 172], &[172]);
}

#[test]
fn calls_without_order_are_found() {
    finds(Defect::Late, &[181, 182, 183, 192, 193], &[181, 182, 183, 192, 193]);
    finds(Defect::NoBarriers, &[162, 180], &[180]);
    finds(Defect::SharesIds, &[162, 186], &[186]);
}

#[test]
fn graphs_that_forget_their_collectives_are_found() {
    finds(Defect::Once, &[162, 189, 190, 191], &[189, 190, 191]);
}

#[test]
fn ranks_that_differ_without_an_error_are_found() {
    let cases = [194, 195, 196, 197, 198, 199, 200, 201, 202, 203, 205];
    finds(Defect::Deaf, &cases, &[194, 195, 196, 197, 198, 199, 201, 202, 203, 205]);
}

#[test]
fn ranks_that_wait_for_nobody_and_aborts_that_end_nothing_are_found() {
    finds(Defect::ComesAlone, &[204], &[204]);
    finds(Defect::IgnoresAborts, &[206, 207], &[206, 207]);
    finds(Defect::LosesErrors, &[162, 206, 207], &[207]);
}
