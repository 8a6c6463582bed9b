//! What a kernel session stages on a stream: data in the stream's scratch.

use crate::kernel::rules::Rules;
use crate::view::Operand;
use leasehold_core::Lease;
use leasehold_core::sync::Arc;
use leasehold_hal::{Binding, Dispatch, Op, Pipeline};

/// One launch, staged.
#[derive(Clone, Copy)]
pub(crate) struct StagedLaunch {
    pub(crate) pipeline: *const Lease<Pipeline>,
    pub(crate) rules: *const Arc<Rules>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) bindings: (u32, u32),
    pub(crate) params: (u32, u32),
}

/// The launches that a session stages; part of the stream's scratch. The raw pointers come from
/// borrows that outlive the session.
#[derive(Default)]
pub(crate) struct Staged {
    /// The recording that the session was begun in; 0 for none.
    pub(crate) recording: u64,
    pub(crate) launches: Vec<StagedLaunch>,
    pub(crate) bindings: Vec<Binding>,
    pub(crate) params: Vec<u8>,
    /// The operands of all launches, for waits and tokens.
    pub(crate) operands: Vec<Operand<'static>>,
    /// Where the present launch's bindings and parameters begin.
    pub(crate) first_binding: usize,
    pub(crate) first_param: usize,
    /// All bits of the addresses of the present launch's bindings.
    pub(crate) addresses: u64,
}

impl Staged {
    pub(crate) fn clear(&mut self) {
        self.launches.clear();
        self.bindings.clear();
        self.params.clear();
        self.operands.clear();
    }

    /// Adds the launches to a submission.
    #[inline]
    pub(crate) fn add_launches(&self, ops: &mut Vec<Op<'static>>) {
        ops.extend(self.launches.iter().map(|launch| {
            // SAFETY: pipelines are borrowed for the session's life; the slices lie in the scratch,
            // which nobody touches while the submission lock is held; `finish` clears the
            // operations before either ends.
            unsafe {
                Op::Dispatch(Dispatch {
                    pipeline: &*launch.pipeline,
                    grid: launch.grid,
                    block: launch.block,
                    shared: launch.shared,
                    bindings: std::slice::from_raw_parts(
                        self.bindings.as_ptr().add(launch.bindings.0 as usize),
                        launch.bindings.1 as usize,
                    ),
                    params: std::slice::from_raw_parts(
                        self.params.as_ptr().add(launch.params.0 as usize),
                        launch.params.1 as usize,
                    ),
                })
            }
        }));
    }
}
