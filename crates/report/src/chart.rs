//! The chart of live and reserved bytes over time, with the marks of events.

use crate::markup::{bytes, coordinate, time};
use crate::model::{Kind, Memory};
use crate::series::{Column, Range, Series};
use std::fmt::Write;

/// The picture's size. It is stretched to its place, so labels stand beside it.
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 300.0;

/// The lanes of marks below the chart: title, style, kinds of events.
pub(crate) const LANES: [(&str, &str, &[Kind]); 6] = [
    ("growths", "growth", &[Kind::Growth, Kind::SegmentAlloc]),
    ("trims", "trim", &[Kind::Trim, Kind::SegmentFree]),
    ("remaps", "remap", &[Kind::Remap]),
    ("host waits", "wait", &[Kind::HostWait]),
    ("stream waits", "wait", &[Kind::StreamWait]),
    ("failures", "failure", &[Kind::OutOfMemory]),
];

/// The scale of bytes: a step between lines, and how many there are.
fn byte_scale(most: u64) -> (u64, u64) {
    let step = (most.max(4) / 4).checked_next_power_of_two().unwrap_or(1 << 62);
    (step, most.max(1).div_ceil(step))
}

/// Times between `from` and `to` at round numbers, five or so.
fn round_times(from: u64, to: u64) -> Vec<u64> {
    let span = to - from;
    let steps = (0..18).flat_map(|n| [1, 2, 5].map(|m| m * 10u64.pow(n)));
    let step = steps.into_iter().find(|s| span / s <= 5).unwrap_or(u64::MAX);
    let first = from.div_ceil(step);
    (first..=to / step).map(|n| n * step).collect()
}

/// A line of the figure beside live bytes: its class, its title and its value.
type Level = (&'static str, &'static str, Option<u64>);

/// Where values and times are in the figure.
struct Scale {
    /// The bytes at the upper edge.
    top: f64,
    columns: usize,
    span: (u64, u64),
}

impl Scale {
    /// A line far above the chart is cut off a little above it.
    fn y(&self, value: u64) -> f64 {
        (HEIGHT - value as f64 / self.top * HEIGHT).max(-HEIGHT)
    }

    /// The part of the width in front of a time.
    fn part(&self, t: u64) -> f64 {
        let (from, to) = self.span;
        (t - from) as f64 / (to - from) as f64
    }

    /// The path of a value over all columns.
    fn curve(&self, series: &Series, before: u64, of: fn(&Column) -> Range) -> String {
        let mut path = format!("M0 {}", coordinate(self.y(before)));
        let mut last = coordinate(self.y(before));
        for c in &series.columns {
            let range = of(c);
            let (a, b) =
                if range.rising { (range.least, range.most) } else { (range.most, range.least) };
            let values = [a, b, range.last].map(|v| coordinate(self.y(v)));
            if values.iter().all(|v| *v == last) {
                continue;
            }
            let x = c.at as f64 / self.columns as f64 * WIDTH;
            let _ = write!(path, "H{}", coordinate(x));
            for value in values {
                if value != last {
                    let _ = write!(path, "V{value}");
                    last = value;
                }
            }
        }
        let _ = write!(path, "H{WIDTH}");
        path
    }
}

/// The figure of a pool's memory. `columns`: how many columns it has. The scale is that of live
/// bytes. The reserved bytes, the imported ones and the budget are drawn if they are near enough.
pub(crate) fn figure(
    memory: &Memory,
    series: &Series,
    columns: usize,
    budget: Option<u64>,
) -> String {
    let imported = memory.stat("imported_bytes").filter(|&bytes| bytes > 0);
    let levels = [
        ("reserved", "reserved at most", Some(series.reserved_peak.value)),
        ("imported", "imported, now", imported),
        ("budget", "budget", budget),
    ];
    let live = series.live_peak.value;
    let base = if live > 0 { live } else { series.reserved_peak.value };
    let near = |value: &u64| *value <= base.saturating_mul(2);
    let shown = levels.map(|(class, title, value)| (class, title, value.filter(near)));
    let (step, lines) =
        byte_scale(shown.iter().filter_map(|level| level.2).fold(base, |most, n| most.max(n)));
    let scale = Scale { top: step as f64 * lines as f64, columns, span: series.span };
    let times = round_times(series.span.0, series.span.1);

    let mut out = String::from("<figure class=\"chart\"><div class=\"y\">");
    for n in 0..=lines {
        let at = coordinate(n as f64 * 100.0 / lines as f64);
        let _ =
            write!(out, "<span style=\"bottom:{at}%\">{}</span>", bytes(n.saturating_mul(step)));
    }
    begin_plot(&mut out, series, columns);
    for n in 0..=lines {
        let at = coordinate(HEIGHT - n as f64 * HEIGHT / lines as f64);
        let _ = write!(out, "<path class=\"grid\" d=\"M0 {at}H{WIDTH}\"/>");
    }
    for &t in &times {
        let at = coordinate(scale.part(t) * WIDTH);
        let _ = write!(out, "<path class=\"grid\" d=\"M{at} 0V{HEIGHT}\"/>");
    }
    curves(&mut out, memory, series, &scale, &shown[1..]);
    lanes(&mut out, memory, series, columns);
    time_labels(&mut out, &scale, &times);
    caption(&mut out, &levels, &shown);
    out
}

/// The beginning of the plot: its data for the pointer, and its text for those who do not see it.
fn begin_plot(out: &mut String, series: &Series, columns: usize) {
    let (from, to) = series.span;
    let _ = write!(
        out,
        "</div><div class=\"plot\" data-from=\"{from}\" data-to=\"{to}\" data-live=\"{}\" \
         data-reserved=\"{}\">",
        largest(series, columns, series.before.0, |c| c.live),
        largest(series, columns, series.before.1, |c| c.reserved)
    );
    let _ = write!(
        out,
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=\"none\" role=\"img\" \
         aria-label=\"Live and reserved bytes from {} to {}: live at most {}, reserved at most {}\">",
        time(from),
        time(to),
        bytes(series.live_peak.value),
        bytes(series.reserved_peak.value)
    );
}

/// Failures, the curves of live and reserved bytes, `levels` as straight lines, and the peak.
fn curves(out: &mut String, memory: &Memory, series: &Series, scale: &Scale, levels: &[Level]) {
    let live = scale.curve(series, series.before.0, |c| c.live);
    let reserved = scale.curve(series, series.before.1, |c| c.reserved);
    let failures = marks(memory, series, scale.columns, &[Kind::OutOfMemory], HEIGHT);
    if !failures.is_empty() {
        let _ = write!(out, "<path class=\"failure line\" d=\"{failures}\"/>");
    }
    let _ = write!(
        out,
        "<path class=\"live area\" d=\"{live}V{HEIGHT}H0z\"/><path class=\"live line\" d=\"{live}\"/>\
         <path class=\"reserved line\" d=\"{reserved}\"/>"
    );
    for (class, _, value) in levels {
        if let Some(value) = *value {
            let at = coordinate(scale.y(value));
            let _ = write!(out, "<path class=\"{class} line\" d=\"M0 {at}H{WIDTH}\"/>");
        }
    }
    let (peak, (from, to)) = (series.live_peak, series.span);
    let _ = write!(
        out,
        "</svg><i class=\"dot\" style=\"left:{}%;top:{}%\"></i></div>",
        coordinate(scale.part(peak.t_us.clamp(from, to)) * 100.0),
        coordinate(scale.y(peak.value) / HEIGHT * 100.0)
    );
}

/// The times of events, in a lane for each group of kinds.
fn lanes(out: &mut String, memory: &Memory, series: &Series, columns: usize) {
    for (title, class, kinds) in LANES {
        let path = marks(memory, series, columns, kinds, 10.0);
        if !path.is_empty() {
            let _ = write!(
                out,
                "<div class=\"lane\">{title}</div><div class=\"marks\"><svg viewBox=\"0 0 {WIDTH} 10\" \
                 preserveAspectRatio=\"none\" role=\"img\" aria-label=\"Times of {title}\">\
                 <path class=\"{class} line\" d=\"{path}\"/></svg></div>"
            );
        }
    }
}

/// The labels of the axis of time.
fn time_labels(out: &mut String, scale: &Scale, times: &[u64]) {
    out.push_str("<div class=\"x\">");
    for &t in times {
        let at = scale.part(t) * 100.0;
        // The outermost labels stay inside.
        let class = if at < 5.0 {
            " class=\"first\""
        } else if at > 95.0 {
            " class=\"last\""
        } else {
            ""
        };
        let _ = write!(out, "<span{class} style=\"left:{}%\">{}</span>", coordinate(at), time(t));
    }
}

/// The text below the figure, which has the levels that are not `shown` as well.
fn caption(out: &mut String, levels: &[Level], shown: &[Level]) {
    out.push_str("</div><figcaption><span class=\"key live\"></span> live ");
    for (&(class, title, value), (.., shown)) in levels.iter().zip(shown) {
        let _ = match value.map(bytes) {
            Some(value) if shown.is_some() => {
                write!(out, "<span class=\"key {class}\"></span> {title} {value} ")
            }
            Some(value) => write!(out, "· {title} {value}, far above the chart "),
            None if class == "budget" => write!(out, "· no budget "),
            None => Ok(()),
        };
    }
    let _ = writeln!(
        out,
        "· the dot is the peak of live bytes · time since the memory was opened <output></output>\
         </figcaption></figure>"
    );
}

/// A vertical line for each column with an event of these kinds.
fn marks(memory: &Memory, series: &Series, columns: usize, kinds: &[Kind], height: f64) -> String {
    let events = memory.events.iter().filter(|e| kinds.contains(&e.kind));
    let mut at: Vec<usize> = events.map(|e| series.column(e.t_us, columns)).collect();
    at.sort_unstable();
    at.dedup();
    let mut path = String::new();
    for column in at {
        let x = (column as f64 + 0.5) / columns as f64 * WIDTH;
        let _ = write!(path, "M{} 0V{height}", coordinate(x));
    }
    path
}

/// The largest value of each column, for the pointer.
fn largest(series: &Series, columns: usize, before: u64, of: fn(&Column) -> Range) -> String {
    let mut out = String::new();
    let (mut now, mut next) = (before, series.columns.iter().peekable());
    for at in 0..columns {
        let range = next.next_if(|c| c.at == at).map(of);
        let most = range.map_or(now, |r| r.most);
        now = range.map_or(now, |r| r.last);
        let _ = write!(out, "{}{most}", if at > 0 { " " } else { "" });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_have_few_round_steps_that_cover_everything() {
        for most in [0, 1, 5, 1000, 4096, 1 << 30, (1 << 30) + 1, u64::MAX / 3] {
            let (step, lines) = byte_scale(most);
            assert!(step.is_power_of_two() && lines <= 5, "{most}: {step} {lines}");
            assert!(u128::from(step) * u128::from(lines) >= u128::from(most), "{most}");
        }
        assert_eq!(round_times(0, 1_000_000).len(), 6);
        assert_eq!(round_times(1_234, 9_876), [2_000, 4_000, 6_000, 8_000]);
        assert_eq!(round_times(7, 8), [7, 8]);
    }
}
