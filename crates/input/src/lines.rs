//! Line input: text by lines of a bounded length.

use std::io::{self, BufRead, BufReader, Read};

/// A byte order mark, which some editors put before a text.
const MARK: &[u8] = "\u{feff}".as_bytes();

/// The reason why a line cannot be read.
#[derive(Debug)]
pub enum LineError {
    /// The read failed.
    Io(io::Error),
    /// The line is longer than the bound, which is the value.
    TooLong(usize),
    /// The line is not UTF-8.
    NoText,
}

impl std::fmt::Display for LineError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LineError::Io(e) => write!(f, "cannot be read: {e}"),
            LineError::TooLong(bound) => write!(f, "longer than {bound} bytes"),
            LineError::NoText => f.write_str("no UTF-8 text"),
        }
    }
}

impl std::error::Error for LineError {}

/// Reads lines with a bounded number of bytes. Its memory is one line and a block of input, for any
/// length of the input.
///
/// ```
/// let mut lines = leasehold_input::Lines::new("\u{feff}a\r\nb".as_bytes(), 80);
/// assert_eq!(lines.next()?, Some("a"));
/// assert_eq!(lines.next()?, Some("b"));
/// assert_eq!(lines.next()?, None);
/// assert_eq!(lines.number(), 2);
/// # Ok::<(), leasehold_input::LineError>(())
/// ```
#[derive(Debug)]
pub struct Lines<R> {
    input: BufReader<R>,
    bound: usize,
    line: Vec<u8>,
    number: u64,
}

impl<R: Read> Lines<R> {
    /// Reads lines of at most `bound` bytes, without their ends.
    pub fn new(input: R, bound: usize) -> Self {
        Self { input: BufReader::with_capacity(1 << 16, input), bound, line: Vec::new(), number: 0 }
    }

    /// The number of lines read so far, which is the number of the last one.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The next line without its end, `None` after the last. A byte order mark before the first
    /// line is skipped.
    ///
    /// # Errors
    /// The reason why the line cannot be read; [`number`](Self::number) is the line's number then.
    #[expect(clippy::should_implement_trait, reason = "the line is lent")]
    pub fn next(&mut self) -> Result<Option<&str>, LineError> {
        self.line.clear();
        // Space for the line, its end of two bytes, and a mark.
        let most = self.bound as u64 + 2 + MARK.len() as u64;
        let n = (&mut self.input).take(most + 1).read_until(b'\n', &mut self.line);
        self.number += 1;
        if n.map_err(LineError::Io)? == 0 {
            self.number -= 1;
            return Ok(None);
        }
        let mut line = &self.line[..];
        if self.number == 1 {
            line = line.strip_prefix(MARK).unwrap_or(line);
        }
        line = line.strip_suffix(b"\n").unwrap_or(line);
        line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.len() > self.bound {
            return Err(LineError::TooLong(self.bound));
        }
        std::str::from_utf8(line).map(Some).map_err(|_| LineError::NoText)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_bound_is_read_and_a_longer_one_is_not() {
        let text = format!("{}\r\n{}\n{}", "a".repeat(8), "b".repeat(8), "c".repeat(9));
        let mut lines = Lines::new(text.as_bytes(), 8);
        assert_eq!(lines.next().unwrap(), Some("aaaaaaaa"));
        assert_eq!(lines.next().unwrap(), Some("bbbbbbbb"));
        assert!(matches!(lines.next(), Err(LineError::TooLong(8))));
        assert_eq!(lines.number(), 3);
    }

    #[test]
    fn a_line_without_end_is_refused_before_it_is_held() {
        let mut lines = Lines::new(io::repeat(b'x'), 100);
        assert!(matches!(lines.next(), Err(LineError::TooLong(100))));
        assert!(lines.line.capacity() < 1 << 12);
        let mut lines = Lines::new(&b"a\xff\n"[..], 100);
        assert!(matches!(lines.next(), Err(LineError::NoText)));
    }
}
