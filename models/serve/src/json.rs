//! The filter `tojson` as transformers has it: Python's `json.dumps`, without escapes for HTML.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Python has a limit too.
const MAX_DEPTH: usize = 500;

/// `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub fn tojson(
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    separators: Option<Vec<String>>,
    named: Kwargs,
) -> Result<String, Error> {
    let indent = indent.or(named.get("indent")?).filter(|indent| !indent.is_none());
    let separators = separators.or(named.get("separators")?);
    let (ascii, sorted): (Option<bool>, Option<bool>) =
        (named.get("ensure_ascii")?, named.get("sort_keys")?);
    named.assert_all_used()?;
    let indent = indent.map(|indent| match indent.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(indent.as_usize().unwrap_or(0).min(100)),
    });
    let [item, key] = match separators.as_deref() {
        None if indent.is_some() => [",".to_owned(), ": ".to_owned()],
        None => [", ".to_owned(), ": ".to_owned()],
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => return Err(invalid("separators are two texts")),
    };
    let ascii = ensure_ascii.or(ascii).unwrap_or(false);
    let mut writer = Writer {
        text: String::new(),
        ascii,
        indent,
        item,
        key,
        sorted: sorted.unwrap_or(false),
        depth: 0,
    };
    writer.value(value)?;
    Ok(writer.text)
}

fn invalid(why: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {why}"))
}

struct Writer {
    text: String,
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sorted: bool,
    depth: usize,
}

impl Writer {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?;
                self.all(['[', ']'], items, |writer, item| writer.value(&item))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.all(['{', '}'], keys.into_iter(), |writer, key| {
                    let name = match key.as_str() {
                        Some(name) => name.to_owned(),
                        None => scalar(&key)?,
                    };
                    writer.string(&name);
                    writer.text += &writer.key;
                    writer.value(&value.get_item(&key)?)
                })?;
            }
            _ => self.text += &scalar(value)?,
        }
        Ok(())
    }

    fn all<T>(
        &mut self,
        [begin, end]: [char; 2],
        mut items: impl Iterator<Item = T>,
        write: impl Fn(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.text.push(begin);
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(invalid("the value is nested too deeply"));
        }
        let mut next = items.next();
        let any = next.is_some();
        while let Some(item) = next {
            self.line();
            write(self, item)?;
            next = items.next();
            if next.is_some() {
                self.text += &self.item;
            }
        }
        self.depth -= 1;
        if any {
            self.line();
        }
        self.text.push(end);
        Ok(())
    }

    fn line(&mut self) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            self.text += &indent.repeat(self.depth);
        }
    }

    fn string(&mut self, string: &str) {
        self.text.push('"');
        for c in string.chars() {
            match c {
                '"' | '\\' => self.text.extend(['\\', c]),
                '\n' => self.text += "\\n",
                '\r' => self.text += "\\r",
                '\t' => self.text += "\\t",
                '\u{8}' => self.text += "\\b",
                '\u{c}' => self.text += "\\f",
                _ if c < ' ' || self.ascii && !c.is_ascii() || self.ascii && c == '\u{7f}' => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.text += &format!("\\u{unit:04x}");
                    }
                }
                _ => self.text.push(c),
            }
        }
        self.text.push('"');
    }
}

/// A value that is neither a text nor a container, as JSON.
fn scalar(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if value.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number => Ok(python_float(value).unwrap_or_else(|| value.to_string())),
        kind => Err(invalid(&format!("{kind} has no form in JSON"))),
    }
}

/// A float as Python writes it: the shortest digits, and an exponent below -4 and from 16 on.
/// `None` for other values.
pub fn python_float(value: &Value) -> Option<String> {
    let float = value.kind() == ValueKind::Number && !value.is_integer();
    let value = float.then(|| f64::try_from(value.clone()).ok())??;
    let short = format!("{value:e}");
    let (digits, exponent) = short.split_once('e').unwrap_or((&short, "0"));
    Some(match exponent.parse::<i32>().unwrap_or(0) {
        exponent @ (16.. | ..-4) => {
            format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
        }
        _ if value.fract() == 0.0 => format!("{value:.1}"),
        _ => value.to_string(),
    })
}
