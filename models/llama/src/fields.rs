//! JSON objects of a model directory: typed access by key, and errors that name file and key.
//!
//! Python's `json` writes `NaN`, `Infinity` and `-Infinity`, which JSON does not have. They are
//! read as texts. So a key that is used and should be a number refuses them by name.

use crate::guess::seems_no_json;
use leasehold::{Error, Result};
use leasehold_input::shown;
use serde_json::{Map, Value};

/// The object in the text of a file; `origin` names the file in messages.
pub(crate) fn object(json: &[u8], origin: &str) -> Result<Map<String, Value>> {
    let value = serde_json::from_slice(&quoted_words(json)).map_err(|e| {
        let why = seems_no_json(json).unwrap_or_else(|| shown(&e.to_string()).to_string());
        Error::invalid(format!("{origin}: no valid JSON: {why}"))
    })?;
    match value {
        Value::Object(map) => Ok(map),
        _ => Err(Error::invalid(format!("{origin}: a JSON object is expected"))),
    }
}

/// The text with Python's words for numbers that are not finite in quotation marks.
fn quoted_words(json: &[u8]) -> Vec<u8> {
    const WORDS: [&[u8]; 3] = [b"NaN", b"Infinity", b"-Infinity"];
    let (mut out, mut rest, mut inside) = (Vec::with_capacity(json.len()), json, false);
    while let Some((&byte, after)) = rest.split_first() {
        let word = WORDS.into_iter().find(|word| !inside && rest.starts_with(word));
        let taken = match (word, byte) {
            (Some(word), _) => {
                out.extend([b"\"", word, b"\""].concat());
                rest = &rest[word.len()..];
                continue;
            }
            (None, b'\\') if inside && !after.is_empty() => 2,
            (None, b'"') => {
                inside = !inside;
                1
            }
            _ => 1,
        };
        out.extend(&rest[..taken]);
        rest = &rest[taken..];
    }
    out
}

/// A JSON object with typed access by key. `null` counts as absent, as in transformers.
pub(crate) struct Fields<'a> {
    pub(crate) map: &'a Map<String, Value>,
    pub(crate) origin: &'a str,
    pub(crate) prefix: &'static str,
}

impl<'a> Fields<'a> {
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn optional<T>(
        &self,
        key: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong_type(key, wanted, value)),
        }
    }

    pub(crate) fn inside(&self, key: &str, prefix: &'static str) -> Result<Option<Fields<'a>>> {
        let map = self.optional(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields { map, origin: self.origin, prefix }))
    }

    pub(crate) fn optional_text(&self, key: &str) -> Result<Option<&'a str>> {
        self.optional(key, "a string", Value::as_str)
    }

    pub(crate) fn flag(&self, key: &str) -> Result<bool> {
        Ok(self.optional(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub(crate) fn optional_number(&self, key: &str) -> Result<Option<f64>> {
        self.optional(key, "a number", Value::as_f64)
    }

    pub(crate) fn number(&self, key: &str) -> Result<f64> {
        self.optional_number(key)?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn optional_positive(&self, key: &str) -> Result<Option<f64>> {
        self.optional_number(key)?.map(|number| self.positive(key, number)).transpose()
    }

    /// A list of so many numbers above zero.
    pub(crate) fn positives(&self, key: &str, count: usize) -> Result<Vec<f64>> {
        let numbers = |v: &Value| v.as_array()?.iter().map(Value::as_f64).collect();
        let list: Vec<f64> =
            self.optional(key, "a list of numbers", numbers)?.ok_or_else(|| self.missing(key))?;
        if list.len() != count {
            let why = format!("{} numbers; {count} are expected", list.len());
            return Err(self.invalid(key, why));
        }
        list.into_iter().map(|number| self.positive(key, number)).collect()
    }

    pub(crate) fn positive(&self, key: &str, number: f64) -> Result<f64> {
        if number.is_finite() && number > 0.0 {
            Ok(number)
        } else {
            Err(self.invalid(key, format!("{number} is not above zero")))
        }
    }

    pub(crate) fn optional_whole(&self, key: &str) -> Result<Option<i128>> {
        self.optional(key, "a whole number", whole)
    }

    pub(crate) fn optional_dim(&self, key: &str, max: u64) -> Result<Option<usize>> {
        match self.optional_whole(key)? {
            None => Ok(None),
            Some(size) if size >= 1 && size <= i128::from(max) => Ok(Some(size as usize)),
            Some(size) => Err(self.invalid(key, format!("{size} is not between 1 and {max}"))),
        }
    }

    pub(crate) fn dim(&self, key: &str, max: u64) -> Result<usize> {
        self.optional_dim(key, max)?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn optional_id(&self, key: &str) -> Result<Option<u32>> {
        self.optional(key, "a token id", token_id)
    }

    pub(crate) fn ids(&self, key: &str) -> Result<Vec<u32>> {
        let ids = self.optional(key, "a token id or a list of them", |value| match value {
            Value::Array(list) => list.iter().map(token_id).collect(),
            one => token_id(one).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    pub(crate) fn missing(&self, key: &str) -> Error {
        self.invalid(key, "is missing")
    }

    pub(crate) fn invalid(&self, key: &str, why: impl std::fmt::Display) -> Error {
        Error::invalid(format!("{}: {}{key}: {why}", self.origin, self.prefix))
    }

    pub(crate) fn wrong_type(&self, key: &str, wanted: &str, found: &Value) -> Error {
        self.invalid(key, format!("{wanted} is expected, not {}", brief(found)))
    }

    pub(crate) fn unsupported(
        &self,
        key: &str,
        found: impl std::fmt::Display,
        supported: &str,
    ) -> Error {
        let found = found.to_string();
        let message = format!(
            "{}: {}{}: {}; supported: {supported}",
            self.origin,
            self.prefix,
            shown(key),
            shown(&found)
        );
        Error::Unsupported(message.into())
    }
}

/// A whole number, which may be written as `32.0`.
fn whole(value: &Value) -> Option<i128> {
    let integer = value.as_i64().map(i128::from).or(value.as_u64().map(i128::from));
    let float = || value.as_f64().filter(|f| f.fract() == 0.0).map(|f| f as i128);
    integer.or_else(float)
}

fn token_id(value: &Value) -> Option<u32> {
    whole(value).and_then(|id| u32::try_from(id).ok())
}

/// A value for a message: its text if that is short.
pub(crate) fn brief(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".into(),
        Value::Array(list) if list.len() > 8 => "a list".into(),
        other => shown(&other.to_string()).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn words_of_python_are_read_outside_of_texts() {
        let text =
            br#"{"a": NaN, "b": [0.0, Infinity, -Infinity], "NaN\\": "\" -Infinity, NaN", "c": 1}"#;
        let wanted = json!({"a": "NaN", "b": [0.0, "Infinity", "-Infinity"],
            "NaN\\": "\" -Infinity, NaN", "c": 1});
        assert_eq!(Value::Object(object(text, "x").unwrap()), wanted);
        for text in ["{\"a\": NaNs}", "{\"a\": nan}", "{\"a\": +Infinity}", "{\"a\": \"\\"] {
            let error = object(text.as_bytes(), "x.json").expect_err(text).to_string();
            assert!(error.contains("x.json: no valid JSON"), "{error}");
        }
    }
}
