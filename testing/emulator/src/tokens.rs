//! The words of a preprocessed C++ text, with their places in the files that it was made of.
//!
//! This module must not know CUDA.

/// A word: a name, a number, a literal, or one character.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Token<'a> {
    /// Its text.
    pub(crate) text: &'a str,
    /// Its first byte in the whole text.
    pub(crate) at: usize,
    /// The file of its line, and the line.
    pub(crate) place: (&'a str, u32),
}

impl Token<'_> {
    /// The byte behind it.
    pub(crate) fn end(&self) -> usize {
        self.at + self.text.len()
    }

    pub(crate) fn is_name(&self) -> bool {
        self.text.starts_with(|c: char| is_name_byte(c as u8) && !c.is_ascii_digit())
    }
}

fn is_name_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_' || b == b'$' || b >= 0x80
}

/// The words outside of the system's headers and of those in the folder `own`.
///
/// # Errors
/// A literal that does not end.
pub(crate) fn tokens<'a>(text: &'a str, own: &str) -> Result<Vec<Token<'a>>, String> {
    let bytes = text.as_bytes();
    let mut all = Vec::new();
    let (mut at, mut file, mut line, mut system) = (0, "", 1, false);
    let mut begins = true;
    while at < bytes.len() {
        let b = bytes[at];
        if b == b'\n' {
            (line, begins, at) = (line + 1, true, at + 1);
        } else if b == b'#' && begins {
            let end = text[at..].find('\n').map_or(text.len(), |n| at + n);
            if let Some((number, name, flags)) = marker(&text[at..end]) {
                (file, line) = (name, number);
                system = flags.contains('3') || name.starts_with(own);
                // The marker is about the line behind it.
                at = (end + 1).min(text.len());
            } else {
                at = end;
            }
        } else if b.is_ascii_whitespace() {
            at += 1;
        } else if system {
            at = text[at..].find('\n').map_or(text.len(), |n| at + n);
        } else {
            begins = false;
            let end = word_end(text, at)
                .ok_or_else(|| format!("{file}:{line}: a literal does not end"))?;
            all.push(Token { text: &text[at..end], at, place: (file, line) });
            line += text[at..end].matches('\n').count() as u32;
            at = end;
        }
    }
    Ok(all)
}

/// Line, file and flags of the preprocessor's `# LINE "FILE" FLAGS`.
fn marker(text: &str) -> Option<(u32, &str, &str)> {
    let rest = text.strip_prefix('#')?.trim_start();
    let (number, rest) = rest.split_once(' ')?;
    let (name, flags) = rest.strip_prefix('"')?.rsplit_once('"')?;
    Some((number.parse().ok()?, name, flags))
}

fn word_end(text: &str, at: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let count = |from: usize, is: fn(u8) -> bool| {
        bytes[from..].iter().position(|&b| !is(b)).map_or(bytes.len(), |n| from + n)
    };
    match bytes[at] {
        b'"' | b'\'' => literal_end(bytes, at),
        b if b.is_ascii_digit() => {
            // A quote between digits separates them.
            let mut end = at;
            loop {
                end = count(end, |b| is_name_byte(b) || b == b'.');
                let more = bytes.get(end) == Some(&b'\'')
                    && bytes.get(end + 1).is_some_and(u8::is_ascii_alphanumeric);
                if !more {
                    return Some(end);
                }
                end += 1;
            }
        }
        b if is_name_byte(b) => {
            let end = count(at, is_name_byte);
            match (&text[at..end], bytes.get(end)) {
                ("R" | "LR" | "uR" | "UR" | "u8R", Some(b'"')) => raw_end(text, end),
                ("L" | "u" | "U" | "u8", Some(b'"' | b'\'')) => literal_end(bytes, end),
                _ => Some(end),
            }
        }
        _ => Some(at + text[at..].chars().next().map_or(1, char::len_utf8)),
    }
}

fn literal_end(bytes: &[u8], at: usize) -> Option<usize> {
    let mut i = at + 1;
    while i < bytes.len() && bytes[i] != b'\n' {
        match bytes[i] {
            b'\\' => i += 1,
            b if b == bytes[at] => return Some(i + 1),
            _ => {}
        }
        i += 1;
    }
    None
}

/// The end of `"DELIMITER(…)DELIMITER"`.
fn raw_end(text: &str, at: usize) -> Option<usize> {
    let open = at + text[at..].find('(')?;
    let close = format!("){}\"", &text[at + 1..open]);
    Some(open + text[open..].find(&close)? + close.len())
}

/// The word that closes the bracket `all[open]`.
pub(crate) fn closing(all: &[Token<'_>], open: usize) -> Option<usize> {
    let mut depth = 0_u32;
    for (i, token) in all.iter().enumerate().skip(open) {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(i);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_know_their_lines() {
        let text = "# 1 \"sys.h\" 1 3\nasm('\n# 7 \"k.cu\" 2\nint x = 1'000; char c = '\\'';\n#pragma once\nconst char* s = R\"a(\n\")a\"; // no\n";
        let all = tokens(text, "own").unwrap();
        let texts: Vec<_> = all.iter().map(|t| t.text).collect();
        assert_eq!(texts[..10], ["int", "x", "=", "1'000", ";", "char", "c", "=", "'\\''", ";"]);
        assert_eq!(all[0].place, ("k.cu", 7));
        let raw = all.iter().find(|t| t.text.starts_with("R\"")).unwrap();
        assert_eq!((raw.text, raw.place), ("R\"a(\n\")a\"", ("k.cu", 9)));
        let after = all.iter().skip_while(|t| t.text != raw.text).nth(1).unwrap();
        assert_eq!((after.text, after.place.1), (";", 10));
        assert!(tokens("# 3 \"k.cu\"\nchar c = 'x\n;", "own").unwrap_err().starts_with("k.cu:3: "));
    }

    #[test]
    fn brackets_close() {
        let all = tokens("f(a[1], {2}) {", "own").unwrap();
        assert_eq!(closing(&all, 1), Some(all.len() - 2));
        assert_eq!(closing(&all, all.len() - 1), None);
    }
}
