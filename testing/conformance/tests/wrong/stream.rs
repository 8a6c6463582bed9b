//! Streams and host timelines of the wrong backend.

use crate::defects::Defect;
use crate::device::{KEPT, Rig};
use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::backend::*;
use leasehold::backend::{
    Handle, Recycle, Resource, Tagged, Timeline, TimelineOwner, TimelineSource, tags,
};
use leasehold::{Error, Lease, Result, Timepoint};
use leasehold_conformance::{Injected, TestKernel};
use std::cell::Cell;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Duration;

thread_local! {
    /// Says whether this thread runs a host call.
    static IN_CALL: Cell<bool> = const { Cell::new(false) };
}

pub(crate) struct Streams {
    pub(crate) defect: Defect,
    pub(crate) rig: Arc<Rig>,
    pub(crate) ordinal: u32,
}

impl Resource for Streams {
    type Payload = WrongStream;
    type Request<'a> = Lease<dyn Stream>;
    const NAME: &'static str = "wrong stream";

    fn create(&self, _: Handle<tags::Stream>, inner: &Lease<dyn Stream>) -> Result<WrongStream> {
        Ok(WrongStream {
            early: if self.defect == Defect::CompletesEarly {
                Some(TimelineOwner::take()?)
            } else {
                None
            },
            inner: inner.clone(),
            defect: self.defect,
            rig: self.rig.clone(),
            ordinal: self.ordinal,
            process: std::process::id(),
            thread: std::thread::current().id(),
            base: AtomicU64::new(u64::MAX),
        })
    }

    fn recycle(&self, _: &mut WrongStream) -> Recycle {
        Recycle::Destroy
    }
}

pub(crate) struct WrongStream {
    /// A separate timeline, for `CompletesEarly`.
    early: Option<TimelineOwner>,
    inner: Lease<dyn Stream>,
    defect: Defect,
    rig: Arc<Rig>,
    ordinal: u32,
    process: u32,
    thread: ThreadId,
    /// The first filled address, for `CutsOffsets`.
    base: AtomicU64,
}

impl Drop for WrongStream {
    fn drop(&mut self) {
        if self.defect == Defect::KeepsForeignDrops && std::thread::current().id() != self.thread {
            KEPT.lock().push(self.inner.clone());
        }
    }
}

impl Tagged for WrongStream {
    type Tag = tags::Stream;
}

// SAFETY: the stream is wrong on purpose. Cases that meet a defect use memory that outlives the
// run.
unsafe impl TimelineSource for WrongStream {
    fn timeline(&self) -> &'static Timeline {
        self.early.as_ref().map_or_else(|| self.inner.timeline(), TimelineOwner::timeline)
    }
    fn signal(&self) -> Result<u64> {
        let value = self.inner.signal()?;
        Ok(self.early.as_ref().map_or(value, |early| early.timeline().submitted()))
    }
    fn refresh(&self) -> Result<u64> {
        let value = self.inner.refresh()?;
        Ok(self.early.as_ref().map_or(value, |early| early.timeline().completed()))
    }

    fn wait(&self, on: Timepoint) -> Result<()> {
        if self.defect == Defect::DropsWaits { Ok(()) } else { self.inner.wait(on) }
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        match self.defect {
            Defect::Hangs => loop {
                std::thread::park();
            },
            Defect::LosesErrors => {
                while self.timeline().completed() < value.min(self.timeline().submitted()) {
                    std::thread::yield_now();
                }
                Ok(())
            }
            Defect::RefusesNested if IN_CALL.get() => Err(Error::state("a host call waits")),
            Defect::CompletesEarly => self.timeline().wait(value, timeout),
            _ => self.inner.wait_host(value, timeout),
        }
    }
}

impl WrongStream {
    /// An address with a 32-bit offset from the first filled one. Only addresses beyond 4 GiB
    /// change, and they stay in the buffer that begins there.
    fn cut(&self, address: u64) -> u64 {
        let base = self.base.load(Ordering::Relaxed);
        match address.checked_sub(base) {
            Some(offset) if offset >> 33 == 0 => base + (offset & u64::from(u32::MAX)),
            _ => address,
        }
    }

    /// Records the first device that wrote an address.
    fn wrote(&self, address: u64) {
        self.rig.written.lock().entry(address).or_insert(self.ordinal);
    }

    /// Applies the defect to an operation; `None` omits the operation.
    fn bend<'a>(&self, op: Op<'a>) -> Result<Option<Op<'a>>> {
        Ok(Some(match (op, self.defect) {
            (Op::Wait(_), Defect::DropsWaits) => return Ok(None),
            (Op::Fill(f), Defect::FillsBytes) => {
                Op::Fill(Fill { pattern: f.pattern & 0xff, width: 1, ..f })
            }
            (Op::Fill(f), Defect::FillsShort) => {
                Op::Fill(Fill { bytes: f.bytes.saturating_sub(f.width.into()), ..f })
            }
            (Op::Copy(c), Defect::CopiesShort) => {
                Op::Copy(Copy2d { width: c.width.saturating_sub(1), ..c })
            }
            (Op::Copies(c), Defect::CopiesShort) => {
                let pieces = c.pieces();
                Op::Copies(Copies::new(&pieces[..pieces.len().saturating_sub(1)])?)
            }
            (Op::Fill(f), Defect::CutsOffsets) => {
                let _ = self.base.compare_exchange(
                    u64::MAX,
                    f.dst,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                Op::Fill(Fill { dst: self.cut(f.dst), ..f })
            }
            (Op::Copy(c), Defect::CutsOffsets) => {
                Op::Copy(Copy2d { src: self.cut(c.src), dst: self.cut(c.dst), ..c })
            }
            (Op::Copy(c), Defect::ReadsWritten) => {
                self.wrote(c.dst);
                op
            }
            (Op::Copy(c), Defect::SkipsPeers) => {
                let known = |address: u64| self.rig.written.lock().get(&address).copied();
                match (known(c.src), known(c.dst)) {
                    (Some(a), Some(b)) if a != b => return Ok(None),
                    (None, None) => self.wrote(c.src),
                    _ => {}
                }
                op
            }
            (
                Op::Fill(Fill { dst, .. }) | Op::Upload(Upload { dst, .. }),
                Defect::ReadsWritten | Defect::SkipsPeers,
            ) => {
                self.wrote(dst);
                op
            }
            (Op::Download(d), Defect::ReadsWritten)
                if !self.rig.written.lock().contains_key(&d.src) =>
            {
                return Err(Error::state("nobody wrote this memory"));
            }
            _ => op,
        }))
    }
}

// SAFETY: the stream is wrong on purpose, but the changed operation stays within the original
// operation's memory.
unsafe impl Stream for WrongStream {
    unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        while self.defect == Defect::HangsInForks && std::process::id() != self.process {
            std::thread::park();
        }
        self.rig.check()?;
        if self.rig.strikes(Injected::Submission) {
            if self.defect == Defect::LosesErrors {
                return Ok(self.timeline().submitted());
            }
            return Err(Error::Driver { api: "submit", code: 1, name: "on request".into() });
        }
        if self.rig.strikes(Injected::DeviceLost) {
            self.rig.lost.store(true, Ordering::Release);
            return self.rig.check().map(|()| 0);
        }
        let traps = |op: &Op<'_>| matches!(op, Op::Dispatch(d) if &*d.pipeline.name == TestKernel::Trap.name());
        let loses = self.defect == Defect::LosesAll && ops.iter().any(traps);
        let mut bent = Vec::with_capacity(ops.len() + 1);
        for op in ops {
            bent.extend(self.bend(*op)?);
        }
        let mut ops = bent;
        if self.defect == Defect::Reorders {
            ops.reverse();
        }
        // Host calls mark their thread, for a wait inside them.
        let calls: Vec<HostCall> = match self.defect {
            Defect::RefusesNested => ops
                .iter()
                .filter_map(|op| if let Op::Host(call) = op { Some(marked(call)) } else { None })
                .collect(),
            _ => Vec::new(),
        };
        let mut marked = calls.iter();
        for op in &mut ops {
            if let Op::Host(call) = op
                && let Some(own) = marked.next()
            {
                *call = own;
            }
        }
        let rig = self.rig.clone();
        let over = HostCall::new("over", move || {
            rig.running.fetch_sub(1, Ordering::Release);
            Ok(())
        });
        if self.defect == Defect::CompletesEarly {
            self.rig.running.fetch_add(1, Ordering::Relaxed);
            ops.push(Op::Host(&over));
        }
        // SAFETY: the caller's promises hold for these operations too, which access no other
        // memory.
        let value = match unsafe { self.inner.submit(&ops) } {
            Err(_) if self.defect == Defect::LosesErrors => return Ok(self.timeline().submitted()),
            other => other?,
        };
        if loses {
            self.rig.lost.store(true, Ordering::Release);
        }
        if self.defect == Defect::BlocksInSubmit {
            let _ = self.inner.wait_host(value, Some(Duration::from_secs(5)));
        }
        if let Some(early) = &self.early {
            let value = early.advance()?;
            early.complete(value);
            return Ok(value);
        }
        Ok(value)
    }

    fn flush(&self) -> Result<()> {
        self.inner.flush()
    }
    fn native(&self) -> u64 {
        if self.defect == Defect::DefaultStream { 1 } else { self.inner.native() }
    }
}

/// The same call, on a thread that is marked during the call.
fn marked(call: &HostCall) -> HostCall {
    let call = call.clone();
    HostCall::new(call.name, move || {
        IN_CALL.set(true);
        let result = call.run();
        IN_CALL.set(false);
        result
    })
}

pub(crate) struct HostTimelines(pub(crate) Defect);

impl Resource for HostTimelines {
    type Payload = WrongHostTimeline;
    type Request<'a> = Lease<dyn HostTimeline>;
    const NAME: &'static str = "wrong host timeline";

    fn create(
        &self,
        _: Handle<tags::HostTimeline>,
        inner: &Lease<dyn HostTimeline>,
    ) -> Result<WrongHostTimeline> {
        Ok(WrongHostTimeline { inner: inner.clone(), defect: self.0 })
    }

    fn recycle(&self, _: &mut WrongHostTimeline) -> Recycle {
        Recycle::Destroy
    }
}

pub(crate) struct WrongHostTimeline {
    inner: Lease<dyn HostTimeline>,
    defect: Defect,
}

impl Tagged for WrongHostTimeline {
    type Tag = tags::HostTimeline;
}

// SAFETY: a host timeline accepts no submissions.
unsafe impl TimelineSource for WrongHostTimeline {
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
        self.inner.wait(on)
    }
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.inner.wait_host(value, timeout)
    }
}

impl HostTimeline for WrongHostTimeline {
    fn signal_host(&self, value: u64) -> Result<()> {
        if self.defect == Defect::LosesSignals { Ok(()) } else { self.inner.signal_host(value) }
    }
    fn fail(&self, cause: Error) {
        self.inner.fail(cause);
    }
}
