//! `TL_MEM_LOG`: one line for each event, for analysis by other programs.
//!
//! `TL_MEM_LOG=1` or `stderr` writes to standard error. Any other value but `0` names a
//! file to append to. Each manager reads the variable once. A line is
//! `tlmem ns=… thread=… depth=… op=…`, followed by the fields `ptr`, `value` and `name`
//! where they apply. A line is written in one call. This module must not know what the events
//! mean.

use std::fmt::{self, Write};
use std::fs::File;
use std::mem::ManuallyDrop;
use std::time::Instant;

/// The maximum length of a line in bytes; longer lines are cut.
const LINE: usize = 1024;

/// The output of the log.
#[derive(Debug)]
pub(crate) struct Log {
    start: Instant,
    /// Standard error is only borrowed, and a file stays open until the process ends.
    file: ManuallyDrop<File>,
}

/// Text in a buffer of fixed size. Longer text is cut. Nothing is allocated.
pub(crate) struct Cut<'a> {
    place: &'a mut [u8],
    used: usize,
    /// Length of the whole text.
    pub(crate) length: usize,
}

impl<'a> Cut<'a> {
    pub(crate) fn new(place: &'a mut [u8]) -> Self {
        Self { place, used: 0, length: 0 }
    }

    /// The text that fits.
    fn text(&self) -> &[u8] {
        &self.place[..self.used]
    }
}

impl Write for Cut<'_> {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        let fits = s.len().min(self.place.len() - self.used);
        self.place[self.used..self.used + fits].copy_from_slice(&s.as_bytes()[..fits]);
        self.used += fits;
        self.length += s.len();
        Ok(())
    }
}

impl Log {
    /// The log that the environment requests.
    #[cfg(all(unix, not(loom)))]
    pub(crate) fn from_env() -> Option<Self> {
        use std::os::fd::FromRawFd;
        let file = crate::env::get(c"TL_MEM_LOG", |to| {
            let text = to.to_bytes();
            let fd = match text {
                b"" | b"0" => return None,
                b"1" | b"stderr" => 2,
                // SAFETY: the path ends with a NUL.
                _ => unsafe {
                    libc::open(
                        to.as_ptr(),
                        libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND | libc::O_CLOEXEC,
                        0o644,
                    )
                },
            };
            // SAFETY: the descriptor is new, or standard error's, and is never closed.
            (fd >= 0).then(|| ManuallyDrop::new(unsafe { File::from_raw_fd(fd) }))
        })??;
        Some(Self { start: Instant::now(), file })
    }

    /// The log that the environment requests.
    #[cfg(all(not(unix), not(loom)))]
    pub(crate) fn from_env() -> Option<Self> {
        let to = std::env::var_os("TL_MEM_LOG").filter(|to| !to.is_empty() && to != "0")?;
        let file = File::options().create(true).append(true).open(to).ok()?;
        Some(Self { start: Instant::now(), file: ManuallyDrop::new(file) })
    }

    pub(crate) fn line(&self, thread: u32, depth: u32, event: fmt::Arguments<'_>) {
        let ns = self.start.elapsed().as_nanos();
        let mut place = [0; LINE];
        let mut line = Cut::new(&mut place[..LINE - 1]);
        // A write into a fixed buffer does not fail.
        let _ = write!(line, "tlmem ns={ns} thread={thread} depth={depth} {event}");
        let used = line.text().len();
        place[used] = b'\n';
        // A failed write of the log must not disturb the program.
        let _ = std::io::Write::write_all(&mut &*self.file, &place[..=used]);
    }
}
