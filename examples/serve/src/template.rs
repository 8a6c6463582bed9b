//! The chat template of a model's directory: messages become a prompt.
//!
//! The template is a program from outside. Its steps and its output are bounded.

use crate::api::Failure;
use leasehold::{Error, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::Value;
use std::io::{self, Write};
use std::path::Path;

/// The maximum size of a file in bytes.
const FILE: u64 = 16 << 20;
/// Steps of a template at most.
const FUEL: u64 = 1_000_000;
/// Bytes of a prompt at most.
const OUTPUT: usize = 8 << 20;
/// The tokens that a template may name.
const SPECIAL: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// A chat template and the special tokens that it may name.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    /// The token at the beginning of a text, if the directory names one.
    pub bos: Option<String>,
}

impl Template {
    /// Reads `chat_template.jinja`, or the template in `tokenizer_config.json`; `None` without one.
    /// Blocks on the files.
    ///
    /// # Errors
    /// `InvalidArgument` for a file that cannot be read, or is no JSON, or no template.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>> {
        let read = |name: &str| {
            let path = dir.join(name);
            let there = path.symlink_metadata().is_ok();
            let bytes = there.then(|| leasehold_input::read(&path, FILE)).transpose();
            bytes.map_err(|e| Error::invalid(e.to_string()))
        };
        let invalid = |name: &str, why: String| {
            Error::invalid(format!("{}: {why}", dir.join(name).display()))
        };
        let config: Value = match read("tokenizer_config.json")? {
            Some(json) => serde_json::from_slice(&json)
                .map_err(|e| invalid("tokenizer_config.json", e.to_string()))?,
            None => Value::Null,
        };
        let (name, source) = match read("chat_template.jinja")? {
            Some(text) => ("chat_template.jinja", String::from_utf8(text).ok()),
            None => ("tokenizer_config.json", named(&config["chat_template"])),
        };
        let Some(source) = source else { return Ok(None) };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| Error::invalid(e.to_string()))?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |why: String| -> std::result::Result<(), _> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, why))
        });
        for key in SPECIAL {
            let token = config[key].as_str().or(config[key]["content"].as_str());
            if let Some(token) = token {
                environment.add_global(key, token.to_owned());
            }
        }
        let bos = &config["bos_token"];
        let bos = bos.as_str().or(bos["content"].as_str()).map(str::to_owned);
        environment
            .add_template_owned("chat", source)
            .map_err(|e| invalid(name, format!("no template: {e:#}")))?;
        Ok(Some(Self { environment, bos }))
    }

    /// The prompt for the assistant's next message.
    ///
    /// # Errors
    /// What the template says of the messages; for a template that takes too long.
    pub fn render(&self, messages: &[Value]) -> std::result::Result<String, Failure> {
        let failed = |e: minijinja::Error| Failure::new(400, format!("the chat template: {e:#}"));
        let chat = self.environment.get_template("chat").map_err(failed)?;
        let mut output = Bounded(Vec::new());
        chat.render_captured_to(
            context! { messages => Serde(messages), add_generation_prompt => true },
            &mut output,
        )
        .map_err(failed)?;
        String::from_utf8(output.0)
            .map_err(|e| Failure::new(400, format!("the chat template: {e}")))
    }
}

/// A template, or the one named `default` of several.
fn named(value: &Value) -> Option<String> {
    let of = |all: &Vec<Value>| {
        let default = all.iter().find(|t| t["name"] == "default")?;
        Some(default["template"].as_str()?.to_owned())
    };
    value.as_str().map(str::to_owned).or_else(|| value.as_array().and_then(of))
}

/// Bytes up to a limit.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT {
            return Err(io::Error::other(format!("the prompt has more than {OUTPUT} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
