//! Live and reserved bytes over time, and their columns.

use crate::model::{Event, Kind, Memory};

/// Values of a time, which lies in one column of the picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Column {
    /// Its number, from the left.
    pub(crate) at: usize,
    pub(crate) live: Range,
    pub(crate) reserved: Range,
}

/// The values that one quantity took in a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) least: u64,
    pub(crate) most: u64,
    pub(crate) last: u64,
    /// The least value came before the largest.
    pub(crate) rising: bool,
}

impl Range {
    fn new(value: u64) -> Self {
        Self { least: value, most: value, last: value, rising: true }
    }

    fn add(&mut self, value: u64) {
        if value < self.least {
            (self.least, self.rising) = (value, false);
        }
        if value > self.most {
            (self.most, self.rising) = (value, true);
        }
        self.last = value;
    }
}

/// A curve's largest value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Peak {
    /// The event that made it; `None`: it was there before the first.
    pub(crate) event: Option<usize>,
    pub(crate) t_us: u64,
    pub(crate) value: u64,
}

/// The curves.
#[derive(Debug, Default)]
pub(crate) struct Series {
    /// The time of the first event and of the last, at least one microsecond later.
    pub(crate) span: (u64, u64),
    /// The live and the reserved bytes before the first event.
    pub(crate) before: (u64, u64),
    pub(crate) live_peak: Peak,
    pub(crate) reserved_peak: Peak,
    /// The columns in which something happened.
    pub(crate) columns: Vec<Column>,
}

/// How an event changes live and reserved bytes.
fn change(event: &Event) -> (i128, i128) {
    let size = i128::from(event.size);
    match event.kind {
        Kind::Alloc => (size, 0),
        Kind::Free => (-size, 0),
        Kind::SegmentAlloc | Kind::Growth => (0, size),
        Kind::SegmentFree | Kind::Trim => (0, -size),
        _ => (0, 0),
    }
}

fn clamped(value: i128) -> u64 {
    u64::try_from(value.max(0)).unwrap_or(u64::MAX)
}

impl Series {
    /// The curves of the events, in `width` columns. They end at what the statistics say, so that
    /// they are right although older events are lost.
    pub(crate) fn new(memory: &Memory, width: usize) -> Self {
        let events = &memory.events;
        let (Some(first), width) = (events.first(), width.max(1)) else { return Self::default() };
        let from = first.t_us.min(u64::MAX - 1);
        let to = events.iter().map(|e| e.t_us).max().unwrap_or(from).max(from + 1);
        let sums = events.iter().map(change).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        let begin = |key: &str, sum: i128| {
            let end = memory.stat(key).map_or(sum.max(0), i128::from);
            (end - sum).max(0)
        };
        let mut now = (begin("live_bytes", sums.0), begin("reserved", sums.1));
        let before = (clamped(now.0), clamped(now.1));
        let peak = |value| Peak { event: None, t_us: from, value };
        let mut series = Self {
            span: (from, to),
            before,
            live_peak: peak(before.0),
            reserved_peak: peak(before.1),
            columns: Vec::new(),
        };
        let mut t = from;
        for (i, event) in events.iter().enumerate() {
            // Threads may record their events in another order than they read the clock.
            t = t.max(event.t_us);
            let by = change(event);
            if by == (0, 0) {
                continue;
            }
            let last = (clamped(now.0), clamped(now.1));
            now = (now.0 + by.0, now.1 + by.1);
            let (live, reserved) = (clamped(now.0), clamped(now.1));
            for (peak, value) in
                [(&mut series.live_peak, live), (&mut series.reserved_peak, reserved)]
            {
                if value > peak.value {
                    *peak = Peak { event: Some(i), t_us: t, value };
                }
            }
            let at = series.column(t, width);
            match series.columns.last_mut() {
                Some(column) if column.at == at => {
                    column.live.add(live);
                    column.reserved.add(reserved);
                }
                _ => {
                    let mut column =
                        Column { at, live: Range::new(last.0), reserved: Range::new(last.1) };
                    column.live.add(live);
                    column.reserved.add(reserved);
                    series.columns.push(column);
                }
            }
        }
        series
    }

    /// The column of a time.
    pub(crate) fn column(&self, t: u64, width: usize) -> usize {
        let (from, to) = self.span;
        let at = u128::from(t.clamp(from, to) - from) * width as u128 / u128::from(to - from);
        (at as usize).min(width - 1)
    }
}
