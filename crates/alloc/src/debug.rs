//! Debug checks: what can be switched on to find wrong uses of memory, and what they report.
//!
//! All are off by default. An allocator without checks pays one predictable branch behind its
//! thread caches, and none in a hit or a free. One with checks takes every request through its lock
//! and, for those that write, keeps freed memory until its streams are done with it. The allocator
//! itself never touches memory: it asks its [`Backing`](crate::Backing) to `fill` and to `verify`.

use leasehold_core::{Error, Result, ShownTag, TimelineId};
use std::fmt;
use std::str::FromStr;

/// The byte that fills a fresh buffer with [`DebugOptions::poison`]: a NaN in every floating-point
/// format.
pub const POISON_FRESH: u8 = 0xFF;
/// The byte that fills freed memory with [`DebugOptions::poison`].
pub const POISON_FREED: u8 = 0xDB;
/// The byte that fills the zone behind a buffer with [`DebugOptions::red_zone`].
pub const RED_ZONE: u8 = 0xFA;

/// Findings that an allocator remembers; later ones are counted only.
pub(crate) const MOST_FINDINGS: usize = 1000;
const DEFAULT_RED_ZONE: u64 = 256;
const DEFAULT_QUARANTINE: u64 = 64 << 20;

/// Which checks an allocator works with.
///
/// From text, as the command takes it: names separated by commas,
/// `poison,red-zone=512,quarantine=16M,guard,pass-through`, or `all` for poison, red zones and a
/// quarantine.
///
/// ```
/// use leasehold_alloc::DebugOptions;
/// let checks: DebugOptions = "poison,quarantine=1M".parse()?;
/// assert!(checks.poison && checks.quarantine == 1 << 20 && checks.red_zone == 0);
/// assert!(!DebugOptions::default().any());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct DebugOptions {
    /// Fresh memory is filled with [`POISON_FRESH`], freed memory with [`POISON_FREED`]. With a
    /// quarantine, a write after the free is found when the block leaves it. Needs memory that the
    /// host can write.
    /// Default: `false`.
    pub poison: bool,
    /// The smallest red zone behind each buffer, in bytes, which nobody may write. Checked when the
    /// buffer was freed and its last use is over. Needs memory that the host can write.
    /// Default: 0, no red zones.
    pub red_zone: u64,
    /// Bytes of freed blocks that are kept from reuse, oldest first out.
    /// Default: 0, no quarantine.
    pub quarantine: u64,
    /// Every buffer has addresses of its own and ends (but for its alignment) where unmapped
    /// addresses begin, so that the device or the processor faults on an overrun; a freed one in
    /// quarantine keeps its addresses without memory. Takes a granule per buffer. Needs a backing
    /// that can reserve addresses.
    /// Default: `false`.
    pub guard: bool,
    /// Every buffer comes straight from the backing, exactly as long as asked for, and goes back to
    /// it, for the vendor's memory checkers.
    /// Default: `false`.
    pub pass_through: bool,
}

impl DebugOptions {
    /// Whether any is on.
    #[must_use]
    pub fn any(&self) -> bool {
        *self != Self::default()
    }

    /// Whether the host writes to the memory.
    pub(crate) fn writes(&self) -> bool {
        self.poison || self.red_zone > 0
    }

    /// Whether every buffer comes straight from the backing.
    pub(crate) fn direct(&self) -> bool {
        self.guard || self.pass_through
    }
}

/// As [`FromStr`] takes it; nothing when none is on.
impl fmt::Display for DebugOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut before = "";
        let mut word = |f: &mut fmt::Formatter<'_>, on: bool, name: &str, bytes: Option<u64>| {
            if !on {
                return Ok(());
            }
            write!(f, "{}{name}", std::mem::replace(&mut before, ","))?;
            bytes.map_or(Ok(()), |n| write!(f, "={n}"))
        };
        word(f, self.poison, "poison", None)?;
        word(f, self.red_zone > 0, "red-zone", Some(self.red_zone))?;
        word(f, self.quarantine > 0, "quarantine", Some(self.quarantine))?;
        word(f, self.guard, "guard", None)?;
        word(f, self.pass_through, "pass-through", None)
    }
}

impl FromStr for DebugOptions {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut debug = DebugOptions::default();
        for word in text.split(',').map(str::trim) {
            let (name, value) = word.split_once('=').map_or((word, None), |(n, v)| (n, Some(v)));
            let size = |default: u64| value.map_or(Ok(default), |v| parse_size(name, v));
            match (name, value) {
                ("poison", None) => debug.poison = true,
                ("guard", None) => debug.guard = true,
                ("pass-through", None) => debug.pass_through = true,
                ("red-zone", _) => debug.red_zone = size(DEFAULT_RED_ZONE)?,
                ("quarantine", _) => debug.quarantine = size(DEFAULT_QUARANTINE)?,
                ("all", None) => {
                    debug.poison = true;
                    debug.red_zone = debug.red_zone.max(DEFAULT_RED_ZONE);
                    debug.quarantine = debug.quarantine.max(DEFAULT_QUARANTINE);
                }
                _ => {
                    return Err(Error::invalid(format!(
                        "debug check `{word}`: want some of poison, red-zone[=BYTES], quarantine[=BYTES], guard, pass-through, all"
                    )));
                }
            }
        }
        if debug.guard && debug.pass_through {
            return Err(Error::invalid(
                "debug checks `guard` and `pass-through` exclude each other",
            ));
        }
        Ok(debug)
    }
}

/// A size like `4096`, `64K`, `16M`, `1G`, above zero.
fn parse_size(name: &str, text: &str) -> Result<u64> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K') => (&text[..text.len() - 1], 10),
        Some(b'M') => (&text[..text.len() - 1], 20),
        Some(b'G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let bytes =
        digits.parse::<u64>().ok().filter(|&n| n > 0).and_then(|n| n.checked_mul(1 << shift));
    bytes.filter(|&n| n <= 1 << 40).ok_or_else(|| {
        Error::invalid(format!("debug check `{name}`: `{text}` is no size (4096, 64K, 16M, 1G)"))
    })
}

/// The kind of wrong use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FindingKind {
    /// Somebody wrote behind the end of a buffer.
    RedZone,
    /// Somebody wrote to memory after it was freed and its last recorded use was over.
    WriteAfterFree,
}

/// A wrong use of memory that a debug check found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finding {
    /// The kind of wrong use.
    pub kind: FindingKind,
    /// The buffer's address.
    pub addr: u64,
    /// The buffer's length in bytes, as asked for.
    pub len: u64,
    /// The first wrong byte, counted from the buffer's address.
    pub offset: u64,
    /// The buffer's release tag.
    pub tag: u32,
    /// The timeline of the stream that it was allocated on.
    pub stream: TimelineId,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            FindingKind::RedZone => "write behind the end of a buffer",
            FindingKind::WriteAfterFree => "write to a buffer after its last use and free",
        };
        let (Self { addr, len, offset, stream, .. }, tag) = (self, ShownTag(self.tag));
        write!(
            f,
            "{what}: byte {offset} of {len} bytes at {addr:#x} ({tag}, allocated on {stream})"
        )
    }
}

#[cfg(test)]
#[path = "../tests/unit/debug.rs"]
mod tests;
