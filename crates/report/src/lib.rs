//! A page about a device's memory, made of a snapshot of the allocator. It is one HTML file with
//! its pictures inside, and loads nothing.
//!
//! [`html`] takes the JSON of `leasehold_snapshot` (all pools of a device), or that of one
//! allocator's `Snapshot`, and returns one HTML file. A small script shows values under the
//! pointer; nothing needs it.
//!
//! The page shows live and reserved bytes over time with the budget, the largest holders at the
//! peak, each segment as a strip of blocks with figures of fragmentation, the events that change
//! or delay something, and the statistics.
//!
//! A snapshot has two other forms: [`memory_viz`] for PyTorch's viewer of allocators, and [`trace`]
//! for a replay.
//!
//! The page's size is bounded: curves and strips are drawn by columns. A column keeps the least and
//! the largest value of its time, so a peak of one microsecond is drawn at its full height.
//!
//! ```
//! let snapshot = r#"{"name": "cuda:0", "stats": {"live_bytes": 512, "reserved": 2097152}}"#;
//! let page = leasehold_report::html(snapshot);
//! assert!(page.starts_with("<!DOCTYPE html>") && page.contains("2,097,152"));
//! ```

mod chart;
mod markup;
pub mod memory_viz;
mod model;
mod page;
mod peak;
mod series;
mod strips;
pub mod trace;

/// The page about a snapshot.
///
/// Text that is no snapshot gives a page that says so. Fields that are missing leave out what needs
/// them. Takes time in proportion to the text: about a second for a million events.
#[must_use]
pub fn html(snapshot: &str) -> String {
    match model::read(snapshot) {
        Ok(device) => page::page(&device),
        Err(e) => page::refusal(&e),
    }
}
