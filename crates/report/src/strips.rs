//! Segments as strips of blocks, and figures of fragmentation.

use crate::markup::{bytes, coordinate, percent};
use crate::model::{Block, Segment, State};
use std::fmt::Write;

/// Height of a strip in units of its picture, and of the shares in a column.
const HEIGHT: u64 = 20;
/// Blocks of a strip that have a text of their own.
const NAMED: usize = 40;

/// Bytes of a segment, or of several, by what they are.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sums {
    pub(crate) segments: u64,
    pub(crate) bytes: u64,
    pub(crate) live: u64,
    pub(crate) ready: u64,
    pub(crate) pending: u64,
    pub(crate) cached: u64,
    pub(crate) other: u64,
    /// Bytes of live blocks beyond what was asked for.
    pub(crate) rounding: u64,
    /// The largest range of neighbours that are ready or pending.
    pub(crate) largest: u64,
}

impl Sums {
    pub(crate) fn of(segment: &Segment) -> Self {
        let mut sums = Self { segments: 1, bytes: segment.bytes, ..Self::default() };
        let (mut run, mut end) = (0u64, 0);
        for b in &segment.blocks {
            let place = match b.state {
                State::Live => {
                    sums.rounding += b.bytes.saturating_sub(b.requested);
                    &mut sums.live
                }
                State::Ready => &mut sums.ready,
                State::Pending => &mut sums.pending,
                State::Cached => &mut sums.cached,
                State::Other => &mut sums.other,
            };
            *place = place.saturating_add(b.bytes);
            let free = matches!(b.state, State::Ready | State::Pending);
            let joined = if end == b.addr { run } else { 0 };
            run = if free { joined.saturating_add(b.bytes) } else { 0 };
            end = b.addr.saturating_add(b.bytes);
            sums.largest = sums.largest.max(run);
        }
        sums
    }

    pub(crate) fn add(&mut self, o: &Self) {
        let pairs = [
            (&mut self.segments, o.segments),
            (&mut self.bytes, o.bytes),
            (&mut self.live, o.live),
            (&mut self.ready, o.ready),
            (&mut self.pending, o.pending),
            (&mut self.cached, o.cached),
            (&mut self.other, o.other),
            (&mut self.rounding, o.rounding),
        ];
        for (sum, part) in pairs {
            *sum = sum.saturating_add(part);
        }
        self.largest = self.largest.max(o.largest);
    }

    /// Bytes that are ready or pending.
    pub(crate) fn free(&self) -> u64 {
        self.ready.saturating_add(self.pending)
    }

    /// The external fragmentation: the part of the free bytes outside of the largest free range.
    pub(crate) fn fragmentation(&self) -> String {
        percent(self.free().saturating_sub(self.largest), self.free())
    }
}

/// The states that a strip draws over its ground, which is free memory, from the bottom.
const DRAWN: [(State, &str); 4] = [
    (State::Live, "live"),
    (State::Pending, "pending"),
    (State::Cached, "cached"),
    (State::Other, "other"),
];

/// The heights of the drawn states in each of `width` columns.
fn columns(segment: &Segment, width: usize) -> Vec<[u64; DRAWN.len()]> {
    let mut parts = vec![[0u128; DRAWN.len()]; width];
    let total = u128::from(segment.bytes.max(1));
    for b in &segment.blocks {
        let Some(row) = DRAWN.iter().position(|d| d.0 == b.state) else { continue };
        // In units of which a column has `total` and the segment `total * width`.
        let from = u128::from(b.addr.saturating_sub(segment.addr)).min(total) * width as u128;
        let to = (from + u128::from(b.bytes) * width as u128).min(total * width as u128);
        let mut at = from;
        while at < to {
            let column = (at / total) as usize;
            let next = to.min((column as u128 + 1) * total);
            parts[column][row] += next - at;
            at = next;
        }
    }
    let heights = parts.into_iter().map(|part| {
        // Each part is visible, however small: its height rounds up.
        part.map(|p| (p * u128::from(HEIGHT)).div_ceil(total) as u64)
    });
    heights.collect()
}

/// The picture of a segment. `named` is the text of a block.
pub(crate) fn strip(
    segment: &Segment,
    width: usize,
    label: &str,
    named: &dyn Fn(&Block) -> String,
) -> String {
    let mut out = format!(
        "<svg class=\"strip\" viewBox=\"0 0 {width} {HEIGHT}\" preserveAspectRatio=\"none\" \
         role=\"img\" aria-label=\"{label}\"><rect class=\"ready\" width=\"{width}\" \
         height=\"{HEIGHT}\"/>"
    );
    let columns = columns(segment, width);
    let mut paths: [String; DRAWN.len()] = Default::default();
    let mut from = 0;
    while from < width {
        let heights = columns[from];
        let to = from + columns[from..].iter().take_while(|c| **c == heights).count();
        let mut bottom = HEIGHT;
        for (path, height) in paths.iter_mut().zip(heights) {
            let height = height.min(bottom);
            if height > 0 {
                bottom -= height;
                let w = to - from;
                let _ = write!(path, "M{from} {bottom}h{w}v{height}h-{w}z");
            }
        }
        from = to;
    }
    for ((_, class), path) in DRAWN.iter().zip(&paths).filter(|(_, path)| !path.is_empty()) {
        let _ = write!(out, "<path class=\"{class}\" d=\"{path}\"/>");
    }
    let mut large: Vec<&Block> =
        segment.blocks.iter().filter(|b| b.bytes > segment.bytes / 100).collect();
    large.sort_by_key(|b| (std::cmp::Reverse(b.bytes), b.addr));
    for b in large.iter().take(NAMED) {
        let unit = width as f64 / segment.bytes.max(1) as f64;
        let (x, w) = (b.addr.saturating_sub(segment.addr) as f64 * unit, b.bytes as f64 * unit);
        let (x, w) = (coordinate(x), coordinate(w));
        let _ = write!(
            out,
            "<rect class=\"block\" x=\"{x}\" width=\"{w}\" height=\"{HEIGHT}\"><title>{}</title></rect>",
            named(b)
        );
    }
    out.push_str("</svg>\n");
    out
}

/// The contents of a strip in words.
pub(crate) fn caption(segment: &Segment, sums: &Sums) -> String {
    let mut out = format!(
        "<code>{:#x}</code> · {} · {} live · {} free, largest range {} · external fragmentation {}",
        segment.addr,
        bytes(segment.bytes),
        percent(sums.live, sums.bytes),
        bytes(sums.free()),
        bytes(sums.largest),
        sums.fragmentation()
    );
    for (n, what) in [(sums.pending, "pending"), (sums.cached, "cached"), (sums.other, "other")] {
        if n > 0 {
            let _ = write!(out, " · {} {what}", bytes(n));
        }
    }
    if segment.paged {
        out.push_str(" · granules are mapped one by one");
    }
    out
}

#[cfg(test)]
#[path = "../tests/unit/strips.rs"]
mod tests;
