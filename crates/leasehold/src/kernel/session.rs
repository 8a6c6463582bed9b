//! Kernel sessions: launches staged on a stream, from `begin` to `finish`.
//!
//! A session claims the stream's submission lock and its scratch memory. Nothing reaches the
//! driver before `finish`, which submits everything staged as one submission and returns its
//! timepoint; dropping the session discards it, on every backend alike. The order of calls is in
//! the type:
//!
//! `Begun` –wait→ `Ready` –bind→ `Bound` –params→ `Parametrised` –dispatch→
//! `Dispatched` –update tokens→ `Updated` –finish, or another kernel→ …
//!
//! The states are moved by value but the session is two words; what is staged lies in the stream's
//! scratch, so a launch allocates nothing.

use crate::kernel::base::{KernelBase, Prepared};
use crate::stream::{Locked, Staged, StagedLaunch, Stream, StreamInner, SubmitGuard, push_waits};
use crate::view::Operand;
use leasehold_core::{Error, Result, Timepoint};
use leasehold_hal::{Access, Binding, LaunchInfo, Limits, Pipeline};
use std::fmt;
use std::marker::PhantomData;

/// The session has a kernel; next come the dependencies.
#[derive(Debug)]
pub struct Begun;
/// The dependencies are known; next come the bindings.
#[derive(Debug)]
pub struct Ready;
/// The operands are bound; next come the parameters.
#[derive(Debug)]
pub struct Bound;
/// The parameters are set; next comes the dispatch.
#[derive(Debug)]
pub struct Parametrised;
/// The launch is staged; next come the tokens.
#[derive(Debug)]
pub struct Dispatched;
/// The tokens are noted; the session may finish or go on with another kernel.
#[derive(Debug)]
pub struct Updated;

/// Launches on a stream, in the making.
///
/// ```
/// use leasehold::kernel::{CpuArgs, KernelCheck, KernelDesc, KernelSource};
/// use leasehold::kernel::{session_ops as ops, session_sync_ops as sync};
/// use leasehold::{Access, DeviceId, KernelBase, KernelSession, Runtime, View};
///
/// unsafe fn double(args: &CpuArgs<'_>) {
///     // SAFETY: each tile has 4 values of its own: the grid has one dimension.
///     let values = unsafe { args.slice_mut::<f32>(0, args.tile()[0] as usize * 4, 4) };
///     values.iter_mut().for_each(|v| *v *= 2.0);
/// }
///
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let (source, check) = (KernelSource::Cpu(double), KernelCheck::grid_1d());
/// let desc = KernelDesc::new("double", source, &[Access::ReadWrite], check);
/// // SAFETY: it touches its binding alone, within bounds that `slice_mut` checks. Each tile
/// // writes a part of its own.
/// let kernel = unsafe { KernelBase::new(desc.aligned(4)) }?;
/// let x = runtime.upload(&[1.0f32; 8])?;
/// let session = KernelSession::begin(&kernel, runtime.stream())?;
/// let session = sync::wait(session, &[x.read_write()])?;
/// let session = ops::bind(session)?;
/// let session = ops::no_params(session)?;
/// let session = ops::dispatch_1d(session, 2, 1)?;
/// sync::update_tokens(session).finish()?;
/// assert_eq!(runtime.to_vec::<f32>(&x)?, [2.0; 8]);
/// # Ok(())
/// # }
/// ```
#[doc(alias("MpsKernelSession", "CudaKernelSession", "CpuKernelSession"))]
#[must_use = "a session that is dropped discards what it staged"]
pub struct KernelSession<'s, State = Begun> {
    stream: &'s Stream,
    submit_guard: SubmitGuard<'s>,
    kernel: &'s Prepared,
    _state: PhantomData<(State, *const ())>,
}

impl<'s> KernelSession<'s, Begun> {
    /// Opens a session on a stream, with its first kernel. Takes the stream's submission lock;
    /// compiles the kernel if it was not yet. A `begin` that fails half way gives back what it
    /// took.
    ///
    /// Blocks while another thread's call or session is at the stream's submission lock. Two
    /// threads that each hold a session and begin one on the other's stream wait for each other for
    /// ever, as with any two locks.
    ///
    /// # Errors
    /// `Occupied` while the calling thread has a session open on the stream, since it would wait
    /// for itself; what making the kernel ready says; the stream's cause when it is poisoned.
    #[inline]
    pub fn begin(kernel: &'s KernelBase, stream: &'s Stream) -> Result<Self> {
        Self::begin_in(kernel, stream, StreamInner::submit_guard)
    }

    /// As [`begin`](Self::begin), but never waits for another thread's turn.
    ///
    /// # Errors
    /// `Occupied` while anybody's call or session is at the stream's submission lock; as
    /// [`begin`](Self::begin).
    pub fn try_begin(kernel: &'s KernelBase, stream: &'s Stream) -> Result<Self> {
        Self::begin_in(kernel, stream, StreamInner::try_submit_guard)
    }

    #[inline]
    fn begin_in(
        kernel: &'s KernelBase,
        stream: &'s Stream,
        take_guard: impl FnOnce(&'s StreamInner) -> Result<SubmitGuard<'s>>,
    ) -> Result<Self> {
        let kernel = kernel.prepared(&stream.runtime)?;
        let mut submit_guard = match stream.recording() {
            Some(recording) => recording.submit_guard()?,
            None => {
                let submit_guard = take_guard(stream.under())?;
                let timeline = stream.under().timeline;
                if timeline.failed(timeline.submitted() + 1) {
                    return Err(stream
                        .failure()
                        .unwrap_or_else(|| Error::state("a poisoned stream without a cause")));
                }
                submit_guard
            }
        };
        submit_guard.scratch().session.clear();
        Ok(Self { stream, submit_guard, kernel, _state: PhantomData })
    }
}

impl<'s, State> KernelSession<'s, State> {
    #[inline]
    pub(crate) fn staged(&mut self) -> &mut Staged {
        &mut self.submit_guard.scratch().session
    }

    #[inline]
    fn become_state<Next>(self) -> KernelSession<'s, Next> {
        let Self { stream, submit_guard, kernel, _state } = self;
        KernelSession { stream, submit_guard, kernel, _state: PhantomData }
    }

    /// Notes the operands that the launch depends on. Used by
    /// [`session_sync_ops::wait`](super::session_sync_ops::wait).
    #[inline]
    pub(crate) fn note_dependencies(
        mut self,
        operands: &[Operand<'s>],
    ) -> Result<KernelSession<'s, Ready>> {
        let stream = self.stream;
        match stream.recording() {
            None => stream.runtime.check_eager(operands)?,
            Some(recording) => {
                stream.runtime.check_operands(operands)?;
                recording.check(operands)?;
            }
        }
        self.kernel.rules.check_limits(operands)?;
        let staged = self.staged();
        // SAFETY: the scratch is cleared before the session's borrows end: by `finish`, or by the
        // next `begin` before it is read.
        let operands =
            unsafe { std::mem::transmute::<&[Operand<'s>], &[Operand<'static>]>(operands) };
        staged.operands.extend(operands.iter().map(|o| o.limited()));
        staged.first_binding = staged.bindings.len();
        let mut addresses = 0;
        staged.bindings.extend(operands.iter().map(|operand| {
            let binding = operand.binding();
            addresses |= binding.addr;
            binding
        }));
        staged.addresses = addresses;
        Ok(self.become_state())
    }

    #[inline]
    pub(crate) fn stage_bindings(mut self) -> Result<KernelSession<'s, Bound>> {
        let Prepared { pipeline, rules, written } = self.kernel;
        let declared = &*pipeline.bindings;
        let staged = self.staged();
        let bindings = &staged.bindings[staged.first_binding..];
        if bindings.len() != declared.len() {
            return Err(wrong_count(pipeline, bindings.len()));
        }
        if std::iter::zip(bindings, declared).any(|(binding, &access)| binding.access != access) {
            return Err(wrong_access(pipeline, bindings));
        }
        rules.check_at(bindings, staged.addresses, *written)?;
        Ok(self.become_state())
    }

    #[inline]
    pub(crate) fn stage_params(mut self, params: &[u8]) -> Result<KernelSession<'s, Parametrised>> {
        if params.len() != self.kernel.pipeline.params as usize {
            return Err(wrong_params(&self.kernel.pipeline, params.len()));
        }
        let staged = self.staged();
        staged.first_param = staged.params.len();
        staged.params.extend_from_slice(params);
        Ok(self.become_state())
    }

    #[inline]
    pub(crate) fn stage_launch(
        mut self,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
    ) -> Result<KernelSession<'s, Dispatched>> {
        let kernel = self.kernel;
        let limits = &self.stream.runtime.limits;
        if (0..3).any(|i| grid[i] > limits.grid[i] || block[i] > limits.block[i] || block[i] == 0) {
            return Err(beyond_grid(&kernel.pipeline, self.stream, (grid, block), limits));
        }
        let threads = block.iter().map(|&b| u64::from(b)).product::<u64>();
        let most = kernel.pipeline.block_threads.min(limits.block_threads);
        if threads > u64::from(most) || shared > limits.shared {
            return Err(beyond_block(&kernel.pipeline, (threads, shared), (most, limits.shared)));
        }
        let staged = self.staged();
        let bindings = &staged.bindings[staged.first_binding..];
        let params = &staged.params[staged.first_param..];
        kernel.rules.check_launch(&LaunchInfo::new((grid, block, shared), params, bindings))?;
        staged.launches.push(StagedLaunch {
            pipeline: &kernel.pipeline,
            rules: &kernel.rules,
            grid,
            block,
            shared,
            bindings: (
                staged.first_binding as u32,
                (staged.bindings.len() - staged.first_binding) as u32,
            ),
            params: (staged.first_param as u32, (staged.params.len() - staged.first_param) as u32),
        });
        Ok(self.become_state())
    }

    #[inline]
    pub(crate) fn tokens_noted(self) -> KernelSession<'s, Updated> {
        self.become_state()
    }
}

impl<'s> KernelSession<'s, Updated> {
    /// Goes on with another kernel; its launch behaves as if it came after the ones staged so far.
    ///
    /// # Errors
    /// The error of making the kernel ready.
    #[inline]
    pub fn kernel(mut self, kernel: &'s KernelBase) -> Result<KernelSession<'s, Begun>> {
        self.kernel = kernel.prepared(&self.stream.runtime)?;
        Ok(self.become_state())
    }

    /// Submits everything staged as one submission, marks the operands, and returns the
    /// submission's point; in a recording the launches are noted, and there is no point.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `DeviceLost`; the driver's own. Nothing was
    /// submitted then.
    #[inline]
    pub fn finish(mut self) -> Result<Option<Timepoint>> {
        let stream = self.stream;
        let scratch = self.submit_guard.scratch();
        let (staged, waits, ops) = (&scratch.session, &mut scratch.waits, &mut scratch.ops);
        let trace = &mut scratch.trace;
        ops.clear();
        waits.clear();
        if let Some(recording) = stream.recording() {
            staged.add_launches(ops);
            // SAFETY: bases are borrowed for the session's life, and what was made ready lies in
            // them.
            let rules = staged.launches.iter().map(|launch| unsafe { (*launch.rules).clone() });
            let partition = stream.under().raw.partition();
            // SAFETY: operands were checked to be this device's or the recording's; bindings are
            // views of them, and their access is the kernel's own declaration.
            let result = unsafe { recording.record_many(ops, rules, &staged.operands, partition) };
            ops.clear();
            return result.map(|()| None);
        }
        let core = stream.under();
        let mut locked = Locked::new(core.timeline, &staged.operands);
        // SAFETY: the submission lock is held until the end.
        unsafe { locked.gather(waits) }?;
        push_waits(waits, ops)?;
        staged.add_launches(ops);
        // SAFETY: operands were checked to be this device's; bindings are views of them, and their
        // access is the kernel's own declaration; the allocator keeps freed memory until its
        // timepoints have passed.
        let result = unsafe { core.submit_list(trace, ops, &staged.operands) };
        let count = ops.len();
        ops.clear();
        let value = result?;
        core.count(count);
        let point = core.timeline.at(value);
        // SAFETY: the submission waited for what was gathered, and the session still holds the
        // stream's submission lock.
        unsafe { locked.mark(point) };
        Ok(Some(point))
    }
}

impl<State> fmt::Debug for KernelSession<'_, State> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelSession({}, {:?})", self.kernel.pipeline.name, self.stream)
    }
}

#[cold]
fn wrong_count(kernel: &Pipeline, count: usize) -> Error {
    Error::invalid(format!(
        "kernel {} takes {} bindings, not {count}; give as many, in the order of its declaration",
        kernel.name,
        kernel.bindings.len()
    ))
}

#[cold]
fn wrong_access(kernel: &Pipeline, bindings: &[Binding]) -> Error {
    let wrong = |(binding, declared): (&Binding, &Access)| binding.access != *declared;
    let i = std::iter::zip(bindings, &kernel.bindings).position(wrong).unwrap_or(0);
    let (declared, bound) = (kernel.bindings[i], bindings[i].access);
    Error::invalid(format!(
        "kernel {}: binding {i} is declared {declared:?} but bound as {bound:?}; bind it by `{}`",
        kernel.name,
        match declared {
            Access::Read => "read()",
            Access::Write => "write()",
            Access::ReadWrite => "read_write()",
        }
    ))
}

#[cold]
fn wrong_params(kernel: &Pipeline, bytes: usize) -> Error {
    Error::invalid(format!(
        "kernel {} takes {} bytes of parameters, not {bytes}; pass the type that it declares",
        kernel.name, kernel.params
    ))
}

#[cold]
fn beyond_grid(
    kernel: &Pipeline,
    stream: &Stream,
    (grid, block): ([u32; 3], [u32; 3]),
    limits: &Limits,
) -> Error {
    Error::invalid(format!(
        "kernel {}: grid {grid:?} of blocks {block:?}; {} takes grids up to {:?} and blocks from [1, 1, 1] up to {:?}: launch smaller ones",
        kernel.name,
        stream.runtime.id(),
        limits.grid,
        limits.block
    ))
}

#[cold]
fn beyond_block(
    kernel: &Pipeline,
    (threads, shared): (u64, u32),
    (most, room): (u32, u32),
) -> Error {
    Error::invalid(format!(
        "kernel {}: {threads} threads and {shared} bytes of shared memory a block; the limits are {most} and {room}: launch smaller blocks",
        kernel.name
    ))
}
