//! `TL_MEM_LOG`: one line per event, for analysis by other programs.
//!
//! `TL_MEM_LOG=1` or `stderr` writes to standard error, any other value but `0` names a file to append to. It is read once per
//! manager. A line is `tlmem ns=… thread=… depth=… op=…` followed by `ptr=0x…`, `value=…`, `name=…` where they apply;
//! it is written in one piece. It must not know what the events mean.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::time::Instant;

/// Where the lines go.
#[derive(Debug)]
pub(crate) struct Log {
    start: Instant,
    file: Option<File>,
}

impl Log {
    /// The log that the environment asks for.
    pub(crate) fn from_env() -> Option<Self> {
        let to = std::env::var_os("TL_MEM_LOG")?;
        if to.is_empty() || to == "0" {
            return None;
        }
        let file = if to == "1" || to == "stderr" {
            None
        } else {
            Some(OpenOptions::new().create(true).append(true).open(to).ok()?)
        };
        Some(Self { start: Instant::now(), file })
    }

    pub(crate) fn line(&self, thread: u32, depth: u32, event: fmt::Arguments<'_>) {
        let ns = self.start.elapsed().as_nanos();
        let line = format!("tlmem ns={ns} thread={thread} depth={depth} {event}\n");
        // A log that cannot be written must not disturb the program.
        let _ = match &self.file {
            Some(file) => (&*file).write_all(line.as_bytes()),
            None => std::io::stderr().write_all(line.as_bytes()),
        };
    }
}
