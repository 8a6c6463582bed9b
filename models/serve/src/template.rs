//! The chat template of a model's directory: messages become a prompt, as transformers makes it.
//!
//! The template is a program from outside. It runs in a process of its own, whose memory and time
//! are bounded, so it can neither end the server nor hold it.

use crate::Done;
use crate::api::Failure;
use crate::json::{python_float, tojson};
use leasehold::backend::sync::Arc;
use leasehold::backend::sync::atomic::{AtomicBool, Ordering};
use leasehold_input::shown_within;
use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind, merge_maps};
use minijinja::{Environment, Error, ErrorKind, context, syntax::SyntaxConfig};
use minijinja_contrib::pycompat::unknown_method_callback;
use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::json;
use std::io::{Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::{fmt, io, time::Duration};
use tokio::{io::AsyncWriteExt, process::Command, time::timeout};

const MAX_SOURCE_BYTES: u64 = 16 << 20;
const MAX_OUTPUT_BYTES: usize = 4 << 20;
/// The address space of the process. A prompt takes a few MiB of it.
const MAX_MEMORY_BYTES: u64 = 256 << 20;
const MAX_PROCESSOR_SECONDS: u64 = 5;
const MAX_TIME: Duration = Duration::from_secs(10);
/// The names that transformers has for tokens, if a model has them.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The templates of a model. The second one is for chats with tools.
pub struct Template {
    program: PathBuf,
    default: Option<String>,
    tool_use: Option<String>,
    tokens: Value,
}

impl Template {
    /// Reads the files that transformers reads: `chat_template.jinja`, or the templates in
    /// `tokenizer_config.json`; and the tokens.
    pub fn from_dir(dir: &Path) -> Done<Option<Self>> {
        let read = |name: &str| {
            let path = dir.join(name);
            path.exists().then(|| leasehold_input::read(&path, MAX_SOURCE_BYTES)).transpose()
        };
        let read_json = |name: &str| -> Done<serde_json::Value> {
            let bytes = read(name)?.unwrap_or_else(|| b"null".to_vec());
            serde_json::from_slice(&bytes)
                .map_err(|e| format!("{}: {name}: {e}", dir.display()).into())
        };
        let text = |name: &str| read(name)?.map(String::from_utf8).transpose().map_err(Into::into);
        let config = read_json("tokenizer_config.json")?;
        let file: Done<Option<String>> = text("chat_template.jinja");
        let (default, tool_use) = match (file?, &config["chat_template"]) {
            (Some(file), _) => (Some(file), text("additional_chat_templates/tool_use.jinja")?),
            (None, serde_json::Value::Array(all)) => {
                let named = |name| {
                    let template = all.iter().find(|t| t["name"] == name)?;
                    template["template"].as_str().map(str::to_owned)
                };
                (named("default"), named("tool_use"))
            }
            (None, one) => (one.as_str().map(str::to_owned), None),
        };
        if default.is_none() && tool_use.is_none() {
            return Ok(None);
        }
        // An older file, which transformers reads for older configurations only.
        let older = config["added_tokens_decoder"].is_null();
        let map = if older { read_json("special_tokens_map.json")? } else { json!(null) };
        let tokens = TOKENS.iter().filter_map(|&key| {
            let named = |from: &serde_json::Value| {
                let token = from[key].as_str().or(from[key]["content"].as_str());
                token.map(str::to_owned)
            };
            Some((key, named(&map).or_else(|| named(&config))?))
        });
        let tokens = Value::from_pairs(tokens);
        // On Linux, also a program whose file was replaced.
        let own = PathBuf::from("/proc/self/exe");
        let program = if own.exists() { own } else { std::env::current_exe()? };
        Ok(Some(Self { program, default, tool_use, tokens }))
    }

    /// Compiles the templates.
    pub async fn check(&self) -> Result<(), Failure> {
        for source in [&self.default, &self.tool_use].into_iter().flatten() {
            self.run(source, &Value::from(())).await?;
        }
        Ok(())
    }

    /// The text that the assistant's next message continues. `chat` has `messages`, and `tools`,
    /// `documents` and other names for the template.
    pub async fn render(&self, chat: Value) -> Result<String, Failure> {
        let (source, values) = self.task(chat)?;
        self.run(source, &values).await
    }

    /// The template of a chat, and all values for it.
    fn task(&self, chat: Value) -> Result<(&str, Value), Failure> {
        let tools = chat.get_attr("tools").is_ok_and(|tools| tools.is_true());
        let source = self.tool_use.as_ref().filter(|_| tools).or(self.default.as_ref());
        let none =
            || Failure::invalid("the chat template is for chats with tools only; give tools");
        Ok((source.ok_or_else(none)?, merge_maps([self.tokens.clone(), chat])))
    }

    /// Renders a template in another process; compiles it only, without values.
    async fn run(&self, source: &str, values: &Value) -> Result<String, Failure> {
        let failed = |why: io::Error| Failure::new(500, format!("the chat template: {why}"));
        let refused = |why: &str| Failure::invalid(format!("the chat template {why}"));
        // Keys of a `Value` keep their order, unlike those of serde_json's.
        let task = [("source", Value::from(source)), ("values", values.clone())];
        let task = serde_json::to_string(&Value::from_pairs(task)).map_err(|e| failed(e.into()))?;
        let mut command = Command::new(&self.program);
        command.arg("--render-chat").kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().map_err(failed)?;
        let stdin = process.stdin.take();
        let work = async {
            if let Some(mut stdin) = stdin {
                // A process that has ended says why.
                stdin.write_all(task.as_bytes()).await.ok();
            }
            process.wait_with_output().await
        };
        let late = |_| refused(&format!("takes longer than {} seconds", MAX_TIME.as_secs()));
        let output = timeout(MAX_TIME, work).await.map_err(late)?.map_err(failed)?;
        let text = |bytes| String::from_utf8(bytes).map_err(|_| refused("makes no text"));
        match output.status.code() {
            Some(0) => text(output.stdout),
            Some(_) => {
                let why = String::from_utf8_lossy(&output.stderr);
                Err(refused(&format!("fails: {}", shown_within(why.trim(), 1000))))
            }
            // By a signal: of the stack's end, of the allocator, or of the processor's time.
            None => Err(refused(&format!(
                "needs more than {} MiB or {MAX_PROCESSOR_SECONDS} seconds, or is nested too deeply",
                MAX_MEMORY_BYTES >> 20
            ))),
        }
    }
}

/// The other process: reads the task from its standard input, and writes the text.
pub fn render_task() -> Done<()> {
    let limit = |what, most| setrlimit(what, Rlimit { current: Some(most), maximum: Some(most) });
    limit(Resource::Core, 0)?;
    limit(Resource::Cpu, MAX_PROCESSOR_SECONDS)?;
    // macOS may refuse this one. The time alone bounds the memory then.
    limit(Resource::As, MAX_MEMORY_BYTES)
        .or_else(|e| cfg!(target_os = "macos").then_some(()).ok_or(e))?;
    let mut task = Vec::new();
    io::stdin().read_to_end(&mut task)?;
    let task: Value = serde_json::from_slice(&task)?;
    let source = task.get_attr("source")?;
    match render(source.as_str().unwrap_or_default(), &task.get_attr("values")?) {
        Ok(text) => io::stdout().write_all(text.as_bytes())?,
        Err(why) => {
            writeln!(io::stderr(), "{why:#}")?;
            std::process::exit(1);
        }
    }
    Ok(())
}

/// Renders as transformers does; compiles only, without values.
pub fn render(source: &str, values: &Value) -> Result<String, Error> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    environment.set_fuel(Some(1_000_000));
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.set_formatter(|output, state, value| match python_float(value) {
        Some(text) => output.write_str(&text).map_err(Error::from),
        None => minijinja::escape_formatter(output, state, value),
    });
    environment.add_filter("string", |value: &Value| {
        python_float(value).unwrap_or_else(|| value.to_string())
    });
    environment.add_filter("tojson", tojson);
    // None is not, in Python.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_function("raise_exception", |why: String| Err::<(), _>(invalid(why)));
    environment.add_function("strftime_now", |format: String| {
        let now = jiff::Zoned::now();
        jiff::fmt::strtime::format(&format, &now).map_err(|e| invalid(format!("strftime_now: {e}")))
    });
    environment.add_template_owned("chat_template", without_generation(source))?;
    let chat = environment.get_template("chat_template")?;
    if values.is_none() {
        return Ok(String::new());
    }
    let none = Value::from(());
    let given = |name| values.get_attr(name).map(|v| if v.is_true() { v } else { none.clone() });
    let all = given("messages")?;
    if all.kind() != ValueKind::Seq {
        return Err(invalid("messages are a list of one at least"));
    }
    let (tools, documents) = (given("tools")?, given("documents")?);
    let attempt = |joined| {
        let watch = Arc::new(Watch::default());
        let messages = all.try_iter()?.map(|one| message(&one, joined, &watch));
        let messages = messages.collect::<Result<Vec<_>, Error>>()?;
        let values = context! { messages, tools => &tools, documents => &documents,
        add_generation_prompt => true, ..values.clone() };
        let mut text = vec![0; MAX_OUTPUT_BYTES];
        let mut output = Cursor::new(&mut text[..]);
        let done = chat.render_captured_to(values, &mut output).map(drop);
        let end = output.position() as usize;
        text.truncate(end);
        let text = done.map(|()| String::from_utf8_lossy(&text).into_owned());
        let printed = watch.printed.load(Ordering::Relaxed);
        let wrong = printed || text.is_err() && watch.parts.load(Ordering::Relaxed);
        Ok::<_, Error>((text, wrong))
    };
    // A template that walks over the parts of a content gets them. One that takes them for a text
    // fails or prints them, and gets the joined text.
    match attempt(false)? {
        (_, true) => attempt(true)?.0,
        (text, false) => text,
    }
}

fn invalid(why: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

/// The tags mark what an assistant wrote, for a training. Here they are a block with a scope.
fn without_generation(source: &str) -> String {
    let (mut text, mut rest) = (String::new(), source);
    while let Some((before, tag)) = rest.split_once("{%") {
        text += before;
        text += "{%";
        rest = tag;
        let name = tag.trim_start_matches(['-', '+']).trim_start();
        for (from, to) in [("generation", "with"), ("endgeneration", "endwith")] {
            let Some(after) = name.strip_prefix(from) else { continue };
            if after.trim_start().trim_start_matches(['-', '+']).starts_with("%}") {
                text += &tag[..tag.len() - name.len()];
                text += to;
                rest = after;
            }
        }
    }
    text + rest
}

/// A message as a template sees it: without keys that are null, with its reasoning under the name
/// that templates read, and with the arguments of calls as objects.
fn message(message: &Value, joined: bool, watch: &Arc<Watch>) -> Result<Value, Error> {
    if message.kind() != ValueKind::Map {
        return Err(invalid("each message is an object"));
    }
    let mut pairs = Vec::new();
    for key in message.try_iter()? {
        let value = message.get_item(&key)?;
        let value = match key.as_str() {
            Some("content") if value.kind() == ValueKind::Seq => content(&value, joined, watch)?,
            Some("tool_calls") if value.kind() == ValueKind::Seq => {
                value.try_iter()?.map(|call| parsed(&call)).collect::<Result<_, _>>()?
            }
            _ => value,
        };
        if !value.is_none() {
            pairs.push((key, value));
        }
    }
    let of = |name| pairs.iter().find(|(key, _)| key.as_str() == Some(name));
    let reasoning = ["reasoning_content", "thinking", "reasoning"].into_iter().find_map(of);
    if let Some((_, reasoning)) = reasoning.cloned() {
        // Of equal keys, the first has the place and the last the value.
        pairs.insert(0, (Value::from("thinking"), reasoning.clone()));
        pairs.push((Value::from("reasoning_content"), reasoning));
    }
    Ok(Value::from_pairs(pairs))
}

/// A call whose arguments are JSON in a text, as clients of OpenAI's API send them.
fn parsed(call: &Value) -> Result<Value, Error> {
    let function = call.get_attr("function")?;
    let arguments = function.get_attr("arguments")?;
    let arguments = arguments.as_str().map(serde_json::from_str::<Value>);
    let Some(Ok(arguments)) = arguments
        .filter(|read| read.as_ref().is_ok_and(|arguments| arguments.kind() == ValueKind::Map))
    else {
        return Ok(call.clone());
    };
    with(call, "function", &with(&function, "arguments", &arguments)?)
}

/// The map with another value of a key.
fn with(map: &Value, key: &str, value: &Value) -> Result<Value, Error> {
    let pairs = map.try_iter()?.map(|k| {
        let value = if k.as_str() == Some(key) { value.clone() } else { map.get_item(&k)? };
        Ok((k, value))
    });
    Ok(Value::from_pairs(pairs.collect::<Result<Vec<_>, Error>>()?))
}

/// A content of parts, which must be texts: the list of them, or the joined text.
fn content(parts: &Value, joined: bool, watch: &Arc<Watch>) -> Result<Value, Error> {
    watch.parts.store(true, Ordering::Relaxed);
    let (mut text, mut items) = (String::new(), Vec::new());
    for part in parts.try_iter()? {
        let (kind, words) = match part.kind() {
            ValueKind::Map => (part.get_attr("type")?, part.get_attr("text")?),
            _ => (Value::from("text"), part.clone()),
        };
        match (kind.as_str(), words.as_str()) {
            (Some("text"), Some(words)) => text += words,
            (kind, _) => {
                let kind = kind.unwrap_or("without a type");
                return Err(invalid(format!("a content's part is {kind}; send texts only")));
            }
        }
        items.push(part);
    }
    Ok(match joined {
        true => Value::from(text),
        false => Value::from_object(Parts { items, text, watch: watch.clone() }),
    })
}

/// The observations of one run of a template.
#[derive(Debug, Default)]
struct Watch {
    /// A content has parts.
    parts: AtomicBool,
    /// Such a content was taken for a text.
    printed: AtomicBool,
}

/// The parts of a content: a list, which notices if it is printed as a whole.
#[derive(Debug)]
struct Parts {
    items: Vec<Value>,
    text: String,
    watch: Arc<Watch>,
}

impl Object for Parts {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.watch.printed.store(true, Ordering::Relaxed);
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests;
