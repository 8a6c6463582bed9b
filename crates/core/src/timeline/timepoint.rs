//! Timepoints: values on timelines, and the names of timelines.
//!
//! This module must not know streams or devices.

use super::{CHUNKS, TIMELINES_PER_CHUNK, Timeline, VALUE_LIMIT, timeline};
use crate::name::Name;
use std::fmt;

/// The name of a timeline. 0 names none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TimelineId(pub(super) u16);

impl TimelineId {
    /// The number, for reports.
    #[must_use]
    pub fn get(self) -> u16 {
        self.0
    }

    /// The timeline of a number, from a report.
    #[must_use]
    pub fn from_number(number: u16) -> Self {
        Self(number)
    }

    /// The name of the timeline's present owner, if it has one ([`Timeline::set_name`]).
    #[must_use]
    pub fn name(self) -> Option<Name> {
        let chunk = CHUNKS[usize::from(self.0) / TIMELINES_PER_CHUNK].get()?;
        chunk[usize::from(self.0) % TIMELINES_PER_CHUNK].name()
    }
}

/// `timeline 5`, or `timeline 5 "decode"` if it has a name.
impl fmt::Display for TimelineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "timeline {}", self.0)?;
        self.name().map_or(Ok(()), |name| write!(f, " {name}"))
    }
}

/// `timeline5`, or `timeline5"decode"` if it has a name.
impl fmt::Debug for TimelineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "timeline{}", self.0)?;
        self.name().map_or(Ok(()), |name| write!(f, "{name}"))
    }
}

/// A value on a timeline: the work that was submitted to the stream up to this value.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Timepoint {
    pub(super) timeline: TimelineId,
    pub(super) value: u64,
}

impl Timepoint {
    /// The timeline's name.
    #[inline]
    #[must_use]
    pub fn timeline_id(self) -> TimelineId {
        self.timeline
    }

    /// The value on the timeline.
    #[inline]
    #[must_use]
    pub fn value(self) -> u64 {
        self.value
    }

    /// The timeline. The reference never dangles.
    #[inline]
    #[must_use]
    pub fn timeline(self) -> &'static Timeline {
        timeline(self.timeline)
    }

    /// Returns whether the timepoint is complete and did not fail. Plain loads; the answer may lag
    /// behind the device.
    #[inline]
    #[must_use]
    pub fn is_settled(self) -> bool {
        self.timeline().is_settled(self.value)
    }

    /// Returns whether the timepoint has [passed](Timeline::has_passed).
    #[inline]
    #[must_use]
    pub fn has_passed(self) -> bool {
        self.timeline().has_passed(self.value)
    }
}

/// A timepoint is a list of one, for calls that wait for several.
impl AsRef<[Timepoint]> for Timepoint {
    fn as_ref(&self) -> &[Timepoint] {
        std::slice::from_ref(self)
    }
}

impl fmt::Debug for Timepoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}@{}", self.timeline, self.value)
    }
}

/// A timepoint in one word: 16 bits of timeline, 48 bits of value. All zero means "never".
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct PackedTimepoint(pub(super) u64);

impl PackedTimepoint {
    /// No timepoint: ordered before all timepoints.
    pub const NEVER: PackedTimepoint = PackedTimepoint(0);

    /// The word.
    #[inline]
    #[must_use]
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// A timepoint from its word.
    #[inline]
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns whether this is [`PackedTimepoint::NEVER`].
    #[inline]
    #[must_use]
    pub fn is_never(self) -> bool {
        self.0 == 0
    }

    /// Returns whether the work of the timepoint is over, complete or failed, with all that it came
    /// after: memory that it used may be reused. [`PackedTimepoint::NEVER`] has passed. A reader of
    /// results asks [`is_settled`](Self::is_settled) instead.
    #[inline]
    #[must_use]
    pub fn has_passed(self) -> bool {
        self.timepoint().is_none_or(|p| p.has_passed())
    }

    /// The timeline's name; 0 for never.
    #[inline]
    #[must_use]
    pub fn timeline_id(self) -> TimelineId {
        TimelineId((self.0 >> 48) as u16)
    }

    /// The value on the timeline.
    #[inline]
    #[must_use]
    pub fn value(self) -> u64 {
        self.0 & (VALUE_LIMIT - 1)
    }

    /// The timepoint, or `None` for never.
    #[inline]
    #[must_use]
    pub fn timepoint(self) -> Option<Timepoint> {
        (self.0 != 0).then(|| Timepoint { timeline: self.timeline_id(), value: self.value() })
    }

    /// Returns whether the timepoint is never, or its timepoint is complete and did not fail.
    #[inline]
    #[must_use]
    pub fn is_settled(self) -> bool {
        self.timepoint().is_none_or(Timepoint::is_settled)
    }
}

impl From<Timepoint> for PackedTimepoint {
    #[inline]
    fn from(p: Timepoint) -> Self {
        debug_assert!(p.value < VALUE_LIMIT);
        PackedTimepoint((u64::from(p.timeline.0) << 48) | (p.value & (VALUE_LIMIT - 1)))
    }
}

impl fmt::Debug for PackedTimepoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.timepoint() {
            Some(p) => p.fmt(f),
            None => f.write_str("never"),
        }
    }
}
