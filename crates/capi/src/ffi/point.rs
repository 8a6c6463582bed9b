//! Points: values of timelines, as plain numbers of the caller's.

use crate::kinds::HOST_TIMELINES;
use crate::objects::Used;
use leasehold::{Error, HostTimeline, Result, Stream, Timepoint};
use leasehold_core::PackedTimepoint;

/// No limit of time.
pub const LEASEHOLD_FOREVER: u64 = u64::MAX;

/// A value of a timeline. All zero is the point that is always over.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeaseholdPoint {
    /// The timeline's number, or a host timeline's handle.
    pub timeline: u64,
    /// The value.
    pub value: u64,
}

/// Values take 48 bits of a packed timepoint.
const VALUES: u32 = 48;

/// A point that a call uses, and the host timeline that it is of.
pub(crate) struct Checked {
    /// `None` for the point that is always over.
    pub(crate) point: Option<Timepoint>,
    _timeline: Option<Used<HostTimeline>>,
}

impl LeaseholdPoint {
    /// The point of a stream's work so far; the one that is always over for a recording's.
    pub(crate) fn now(stream: &Stream) -> Self {
        if stream.is_recording() { Self::default() } else { stream.now().into() }
    }

    /// Writes the point of a stream's work so far, unless nobody wants it.
    ///
    /// # Safety
    /// - `to` is null or can be written.
    #[inline]
    pub(crate) unsafe fn give(to: *mut Self, stream: &Stream) {
        if !to.is_null() {
            // SAFETY: the caller says that it can be written.
            unsafe { to.write(Self::now(stream)) }
        }
    }

    /// The timepoint.
    ///
    /// # Errors
    /// `InvalidArgument` for a point that no call gave: its wait would never end.
    pub(crate) fn check(self) -> Result<Checked> {
        if self == Self::default() {
            return Ok(Checked { point: None, _timeline: None });
        }
        let Ok(number) = u16::try_from(self.timeline) else {
            let timeline = HOST_TIMELINES.get(self.timeline)?;
            let point = timeline.at(self.value);
            return Ok(Checked { point: Some(point), _timeline: Some(timeline) });
        };
        let point = PackedTimepoint::from_bits(u64::from(number) << VALUES | self.value);
        let point = point.timepoint().filter(|point| {
            let timeline = point.timeline();
            number != 0
                && self.value >> VALUES == 0
                && !timeline.is_external()
                && point.value() <= timeline.submitted()
        });
        let never = || {
            let Self { timeline, value } = self;
            Error::invalid(format!(
                "point {value} of timeline {timeline} was never submitted: take points from calls"
            ))
        };
        Ok(Checked { point: Some(point.ok_or_else(never)?), _timeline: None })
    }
}

impl From<Timepoint> for LeaseholdPoint {
    fn from(point: Timepoint) -> Self {
        Self { timeline: point.timeline_id().get().into(), value: point.value() }
    }
}
