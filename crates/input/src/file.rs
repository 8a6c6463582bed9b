//! File input: regular files only, within a limit.

use crate::shown_within;
use std::fmt;
use std::fs::{File, FileType, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// The reason why a file is not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// No file has this name.
    Missing,
    /// The system refuses to open or read the file.
    Unreadable,
    /// The path is a folder, a pipe, a socket or a device.
    NotRegular,
    /// The file is longer than its limit.
    TooLong,
}

/// The refusal of a file. The display is one line that names the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason.
    pub cause: Cause,
    message: String,
}

impl Refusal {
    fn new(path: &Path, cause: Cause, what: impl fmt::Display) -> Self {
        // The maximum length of a path on common systems.
        let name = path.display().to_string();
        Self { cause, message: format!("{}: {what}", shown_within(&name, 4096)) }
    }

    fn of(path: &Path, e: &io::Error) -> Self {
        let cause =
            if e.kind() == ErrorKind::NotFound { Cause::Missing } else { Cause::Unreadable };
        Self::new(path, cause, e)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Refusal {}

/// Opens a regular file for reading. Never waits for a pipe's writer, and follows links.
///
/// # Errors
/// [`Cause::Missing`], [`Cause::Unreadable`], [`Cause::NotRegular`].
pub fn open(path: &Path) -> Result<File, Refusal> {
    let mut how = OpenOptions::new();
    how.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // Without this flag, the open of a pipe waits for its writer. The flag has no effect on
        // regular files.
        how.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    }
    let file = how.open(path).map_err(|e| Refusal::of(path, &e))?;
    // The check uses the opened file, because the path may name another file by now.
    let kind = file.metadata().map_err(|e| Refusal::of(path, &e))?.file_type();
    if !kind.is_file() {
        return Err(Refusal::new(
            path,
            Cause::NotRegular,
            format_args!("{}; a regular file is expected", name(kind)),
        ));
    }
    Ok(file)
}

/// Reads a whole regular file of at most `limit` bytes.
///
/// # Errors
/// As [`open`]; [`Cause::TooLong`], also for a file that grows during the read.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, Refusal> {
    let file = open(path)?;
    let too_long = |size: fmt::Arguments<'_>| {
        Refusal::new(path, Cause::TooLong, format_args!("{size}; at most {limit} bytes are read"))
    };
    let size = file.metadata().map_err(|e| Refusal::of(path, &e))?.len();
    if size > limit {
        return Err(too_long(format_args!("the file has {size} bytes")));
    }
    let mut bytes = Vec::with_capacity(size as usize);
    file.take(limit.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|e| Refusal::of(path, &e))?;
    if bytes.len() as u64 > limit {
        return Err(too_long(format_args!("the file has more than {limit} bytes")));
    }
    Ok(bytes)
}

fn name(kind: FileType) -> &'static str {
    if kind.is_dir() {
        return "a folder";
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a pipe";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
    }
    "no file of data"
}
