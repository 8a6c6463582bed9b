//! How a stream can wait for a timepoint: natively, for a mark that the other stream has recorded,
//! or not yet.
//!
//! A mark on another stream is made under that stream's lock. So a wait is resolved before the
//! waiting stream's own lock is taken.
//!
//! This module must not know what waits.

use crate::Op;
use crate::engine::driver::{DriverStream, Passed};
use crate::engine::prepared::{NativeWait, Preparation, Ready};
use crate::engine::state::{RECORDED_MARKS, RecordedMark, State, StreamCore};
use crate::engine::timelines::Origin;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Result, Timepoint};

impl<N: DriverStream> StreamCore<N> {
    /// Prepares an operation for the driver. The caller holds no lock.
    pub(crate) fn prepare(&self, op: &Op<'_>) -> Result<Ready<N>> {
        match op {
            Op::Wait(p) => self.resolve(*p),
            _ if self.is_plain(op) => Ok(Ready::Now(None)),
            Op::Graph(_) | Op::Host(_) | Op::Foreign(_) => Ok(Ready::Blocked),
            // The driver's own preparation was made as the operation was submitted.
            _ => Ok(Ready::Now(None)),
        }
    }

    /// How this stream can wait for a timepoint.
    pub(crate) fn resolve(&self, point: Timepoint) -> Result<Ready<N>> {
        if self.is_own(point) {
            return Ok(Ready::Now(None));
        }
        match point.timeline().check(point.value()) {
            Ok(true) => return Ok(Ready::Now(None)),
            Err(cause) => return Ok(Ready::Failed(cause)),
            Ok(false) => {}
        }
        let (mark, passed) = match self.core.tables.origin(point.timeline_id()) {
            Some(Origin::HostTimeline) => return Ok(Ready::Blocked),
            Some(Origin::Stream(source)) => {
                // If the stream is gone, all its values are over or soon will be.
                let Some(source) = source.upgrade() else { return Ok(Ready::Blocked) };
                let Some((mark, value)) = source.mark_for(point.value())? else {
                    return Ok(Ready::Blocked);
                };
                let abroad = !Arc::ptr_eq(&source.core.device, &self.core.device);
                (mark, Some(Passed { point, value, abroad }))
            }
            None => match self.native.mark_outside(point)? {
                Some((mark, _)) => (mark, None),
                None => return Ok(Ready::Blocked),
            },
        };
        Ok(Ready::Now(Some(Preparation::Wait(NativeWait { mark, passed }))))
    }

    /// Returns a recorded mark that covers `value` and as little later work as possible. The
    /// returned value is the last one that the mark covers. `None` while `value` is held back.
    pub(crate) fn mark_for(&self, value: u64) -> Result<Option<(N::Mark, u64)>> {
        let find = |state: &State<N>| {
            state.recorded.iter().find(|m| m.value >= value).map(|m| (m.mark.clone(), m.value))
        };
        {
            let state = self.state.lock();
            if self.issued.load(Ordering::Relaxed) < value {
                return Ok(None);
            }
            if let Some(mark) = find(&state) {
                return Ok(Some(mark));
            }
        }
        let mut mark = self.native.mark().map_err(|e| self.core.settle(e))?;
        let mut state = self.state.lock();
        if let Some(mark) = find(&state) {
            return Ok(Some(mark));
        }
        let issued = self.issued.load(Ordering::Relaxed);
        if let Err(e) = self.native.record(&mut mark, issued) {
            drop(state);
            return Err(self.core.settle(e));
        }
        if state.recorded.len() == RECORDED_MARKS {
            state.recorded.pop_front();
        }
        state.recorded.push_back(RecordedMark { value: issued, mark: mark.clone() });
        Ok(Some((mark, issued)))
    }
}
