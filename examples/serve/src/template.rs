//! The chat template of a model's directory: messages become a prompt.
//!
//! The template is a program from outside. Its steps and its output are bounded.

use crate::Done;
use crate::api::{Failure, Result};
use minijinja::{Environment, Error, ErrorKind, context, syntax::SyntaxConfig, value::Serde};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::Value;
use std::io::Cursor;
use std::path::Path;

const MAX_OUTPUT_BYTES: usize = 4 << 20;

pub struct Template(Environment<'static>);

impl Template {
    /// Reads `chat_template.jinja`, or the template in `tokenizer_config.json`.
    pub fn from_dir(dir: &Path) -> Done<Option<Self>> {
        let read = |name: &str| {
            let path = dir.join(name);
            path.exists().then(|| leasehold_input::read(&path, 16 << 20)).transpose()
        };
        let config = read("tokenizer_config.json")?.unwrap_or_else(|| b"null".to_vec());
        let config: Value = serde_json::from_slice(&config)
            .map_err(|e| format!("{}: tokenizer_config.json: {e}", dir.display()))?;
        let source = match (read("chat_template.jinja")?, config["chat_template"].as_str()) {
            (Some(text), _) => String::from_utf8(text)?,
            (None, Some(text)) => text.to_owned(),
            (None, None) => return Ok(None),
        };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(1_000_000));
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |why: String| {
            Err::<(), _>(Error::new(ErrorKind::InvalidOperation, why))
        });
        for key in ["bos_token", "eos_token", "pad_token", "unk_token"] {
            let token = config[key].as_str().or(config[key]["content"].as_str());
            environment.add_global(key, token.map(str::to_owned));
        }
        environment.add_template_owned("chat_template", source)?;
        Ok(Some(Self(environment)))
    }

    /// The text that the assistant's next message continues.
    pub fn render(&self, messages: &[Value]) -> Result<String> {
        let failed = |e: Error| Failure(400, format!("the chat template: {e:#}"));
        let chat = self.0.get_template("chat_template").map_err(failed)?;
        let values = context! { messages => Serde(messages), add_generation_prompt => true };
        let mut text = vec![0; MAX_OUTPUT_BYTES];
        let mut output = Cursor::new(&mut text[..]);
        chat.render_captured_to(values, &mut output).map_err(failed)?;
        let end = output.position() as usize;
        Ok(String::from_utf8_lossy(&text[..end]).into_owned())
    }
}
