//! Operations on their way to the driver, with their preparations, in the stream's lock.
//!
//! The compiler inlines the way of a submission without preparations: a call returns a `Result` of
//! five words through memory.
//!
//! This module must not know where the operations come from, nor what becomes of a refused one.

use crate::Op;
use crate::engine::driver::{CompletionAction, DriverDevice, DriverStream, GraphSteps, Sink};
use crate::engine::prepared::Preparation;
use crate::engine::state::{RECENT, State, StreamCore};
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, Result};

/// An operation that the driver refused.
pub(crate) struct Refusal {
    pub(crate) error: Error,
    /// The driver had accepted another operation of the same submission.
    pub(super) accepted: bool,
    /// The refused operation.
    pub(super) op: String,
}

impl<N: DriverStream> StreamCore<N> {
    /// Whether an operation can go to the driver without preparation.
    #[inline(always)]
    pub(crate) fn is_plain(&self, op: &Op<'_>) -> bool {
        match op {
            Op::Wait(p) => self.is_own(*p) || p.is_settled(),
            // SAFETY: graphs of a submission belong to this device (the submitter's promise).
            Op::Graph(exec) => unsafe { N::graph(exec) }.steps().is_plain(),
            Op::Host(_) | Op::Foreign(_) => false,
            other => self.native.is_plain(other),
        }
    }

    /// Gives operations to the driver with their preparations, in the lock. `part`: the driver was
    /// given operations of the same submission before.
    ///
    /// # Safety
    /// - As [`submit`](Self::submit): the memory of the operations may be used until the submission
    ///   is over.
    #[inline(always)]
    pub(crate) unsafe fn issue<'o: 'r, 'r>(
        &self,
        state: &mut State<N>,
        value: u64,
        ops: impl Iterator<Item = (&'r Op<'o>, Option<Preparation<N>>)>,
        part: bool,
    ) -> std::result::Result<(), Refusal> {
        let mut sink = Sink { value, host: &self.host, accepted: part };
        let mut failed = None;
        match self.native.enter() {
            Err(error) => {
                return Err(Refusal { error, accepted: part, op: "submission".to_owned() });
            }
            Ok(mut entry) => {
                for (op, preparation) in ops {
                    // SAFETY: the caller vouches for the operation.
                    let given = unsafe { self.give(&mut entry, op, preparation, &mut sink) };
                    if let Err(error) = given {
                        failed = Some((error, op.name()));
                        break;
                    }
                    if let Op::Dispatch(d) = op {
                        self.recent[value as usize % RECENT]
                            .store(d.pipeline.native, Ordering::Relaxed);
                    }
                }
                if let Err(error) = self.native.leave(entry)
                    && failed.is_none()
                {
                    failed = Some((error, "submission".to_owned()));
                }
            }
        }
        let accepted = sink.accepted;
        state.dirty |= accepted;
        match failed {
            Some((error, op)) => Err(Refusal { error: self.core.device.note(error), accepted, op }),
            None => Ok(()),
        }
    }

    /// Gives one operation to the driver.
    ///
    /// # Safety
    /// - As [`submit`](Self::submit).
    #[inline(always)]
    unsafe fn give(
        &self,
        entry: &mut N::Entry<'_>,
        op: &Op<'_>,
        preparation: Option<Preparation<N>>,
        sink: &mut Sink<'_, N>,
    ) -> Result<()> {
        let own = match preparation {
            None => None,
            Some(Preparation::Driver(own)) => Some(own),
            Some(Preparation::Wait(wait)) => {
                let given = self.native.encode_wait(entry, &wait.mark);
                sink.took(given)?;
                if let Some(passed) = wait.passed {
                    self.host.leave(sink.value, CompletionAction::Passed(passed));
                }
                return Ok(());
            }
        };
        match op {
            Op::Wait(_) => Ok(()),
            Op::Host(_) | Op::Foreign(_) => {
                Err(Error::state(format!("a {} is not given to the driver", op.kind())))
            }
            // SAFETY: the caller vouches for the operation.
            op => unsafe { self.native.encode(entry, op, own, sink) },
        }
    }
}
