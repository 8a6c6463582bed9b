//! The command, which `ci/programs.sh serve` takes from this test's build: what clients send it
//! over HTTP, and templates that would end or hold it.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any answer takes.
const LONG: Duration = Duration::from_secs(100);

/// A server on a port of the system's choice.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold-serve"));
        command.args(["--listen", "127.0.0.1:0"]).args(arguments).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit(' ').next().unwrap().to_owned();
        assert!(line.starts_with("listening on "), "{line}");
        Self { process, address }
    }

    fn open(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let length = body.len();
        write!(stream, "{head} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n{body}")
            .unwrap();
        stream
    }

    /// The head and the body of an answer.
    fn send(&self, head: &str, body: &str) -> (String, String) {
        let mut answer = String::new();
        self.open(head, body).read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_owned(), body.to_owned())
    }

    /// The status and the object.
    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (head, answer) = self.send(&format!("POST {path}"), &body.to_string());
        (head[9..12].parse().unwrap(), serde_json::from_str(&answer).unwrap())
    }

    fn complete(&self, more: &Value) -> Value {
        let mut body = json!({"prompt": "import os", "max_tokens": 6, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = self.post("/v1/completions", &body);
        assert_eq!(status, 200, "{body}: {answer}");
        answer
    }

    /// The events of a stream.
    fn stream(&self, path: &str, mut body: Value) -> Vec<Value> {
        body["stream"] = true.into();
        let (head, text) = self.send(&format!("POST {path}"), &body.to_string());
        assert!(head.contains(" 200 "), "{head}: {text}");
        assert!(text.contains("data: [DONE]"), "{text}");
        let events = text.lines().filter_map(|line| line.strip_prefix("data: {"));
        events.map(|event| serde_json::from_str(&format!("{{{event}")).unwrap()).collect()
    }

    /// The time that the process takes to end after SIGTERM.
    fn end(mut self) -> Duration {
        let begin = Instant::now();
        let id = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
        assert!(self.process.wait().unwrap().success());
        begin.elapsed()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

fn texts(answer: &Value) -> Vec<&str> {
    let choices = answer["choices"].as_array().unwrap();
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index, "{answer}");
    }
    choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect()
}

#[test]
fn a_directory_without_a_model_is_an_error_that_names_it() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold-serve"));
    let output = command.args(["--model", "no-such-model"]).output().unwrap();
    let why = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{why}");
    assert!(why.contains("no-such-model"), "{why}");
}

#[test]
fn fields_that_ask_for_nothing_pass_and_others_are_refused_by_name() {
    let server = Server::start(&[]);
    let common = json!({"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {},
        "user": "a", "logprobs": null, "store": false, "metadata": {"a": "b"}, "tools": null,
        "stream_options": null, "service_tier": "auto", "model": "demo-model"});
    let text = json!({"best_of": 1, "echo": false, "suffix": null, "tools": [], "min_tokens": 0,
        "skip_special_tokens": true, "include_stop_str_in_output": false});
    let chat = json!({"logprobs": false, "top_logprobs": null, "tool_choice": "auto", "tools": [],
        "response_format": {"type": "text"}, "parallel_tool_calls": true});
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let chats = json!({"messages": messages, "max_tokens": 4, "temperature": 0});
    let prompts = json!({"prompt": "Hi", "max_tokens": 4, "temperature": 0});
    for (path, body, fields) in
        [("/v1/completions", prompts, text), ("/v1/chat/completions", chats, chat)]
    {
        let (status, plain) = server.post(path, &body);
        assert_eq!(status, 200, "{plain}");
        let mut all = body.clone();
        for more in [&common, &fields] {
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        }
        let (status, answer) = server.post(path, &all);
        assert_eq!((status, &answer["choices"]), (200, &plain["choices"]), "{answer}");
        for (name, value) in [
            ("n", json!(2)),
            ("n", json!(1000)),
            ("presence_penalty", json!(1.0)),
            ("logit_bias", json!({"5": -100})),
            ("response_format", json!({"type": "json_object"})),
            ("tools", json!([{"type": "function"}])),
            ("top_k", json!(-2)),
            ("logprobs", json!(21)),
            ("maximum", json!(5)),
            ("chat_template_kwargs", json!([1])),
        ] {
            let mut body = body.clone();
            body[name] = value;
            let (status, answer) = server.post(path, &body);
            let why = answer["error"]["message"].as_str().unwrap();
            let named = why.contains(name) || why.contains("ask for 128");
            assert!(status == 400 && named, "{name}: {status} {why}");
        }
    }
    // A template may have the tools if no calls are expected.
    let body = json!({"messages": messages, "max_tokens": 1, "tool_choice": "none",
        "tools": [{"type": "function", "function": {"name": "a"}}]});
    assert_eq!(server.post("/v1/chat/completions", &body).0, 200);
}

#[test]
fn lists_of_prompts_have_a_choice_each_and_seeds_differ() {
    let server = Server::start(&["--slots", "2"]);
    let one = |prompt: Value| texts(&server.complete(&json!({"prompt": prompt})))[0].to_owned();
    for (many, each) in [
        (json!(["import os"]), vec![json!("import os")]),
        (json!([[40, 41]]), vec![json!([40, 41])]),
        (
            json!(["Hi", "import", "def a", "x = "]),
            vec![json!("Hi"), json!("import"), json!("def a"), json!("x = ")],
        ),
        (json!([[40], [41, 42]]), vec![json!([40]), json!([41, 42])]),
    ] {
        let wanted: Vec<_> = each.into_iter().map(one).collect();
        let answer = server.complete(&json!({"prompt": many}));
        assert_eq!(texts(&answer), wanted);
        assert_eq!(answer["usage"]["completion_tokens"], 6 * wanted.len(), "{answer}");
        let body = json!({"prompt": many, "max_tokens": 6, "temperature": 0});
        let mut streamed = vec![String::new(); wanted.len()];
        for event in server.stream("/v1/completions", body) {
            let choice = &event["choices"][0];
            let index = choice["index"].as_u64().unwrap() as usize;
            streamed[index] += choice["text"].as_str().unwrap();
        }
        assert_eq!(streamed, wanted);
    }
    // Texts of one prompt have seeds in a row.
    let more = |n: usize, seed: usize| json!({"n": n, "seed": seed, "temperature": 1.0});
    let three = server.complete(&more(3, 5));
    let three = texts(&three);
    assert_ne!(three[0], three[1]);
    assert_eq!(texts(&server.complete(&more(1, 7))), [three[2]]);
    let (status, answer) = server.post("/v1/completions", &json!({"prompt": ["a", 1]}));
    assert_eq!(status, 400);
    assert!(answer["error"]["message"].as_str().unwrap().contains("expected a prompt"));
}

#[test]
fn a_prompt_or_text_beyond_the_context_has_a_code_and_both_numbers() {
    let server = Server::start(&["--positions", "64"]);
    let long = vec![40; 300];
    let fits = vec![40; 60];
    for (body, numbers) in [
        (json!({"prompt": long, "max_tokens": 4}), ["300", "64"]),
        (json!({"prompt": ["a", "a ".repeat(300)]}), ["tokens", "64"]),
        (json!({"prompt": fits, "max_tokens": 5}), ["65", "64"]),
    ] {
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")));
        let why = answer["error"]["message"].as_str().unwrap();
        assert!(numbers.iter().all(|number| why.contains(number)), "{why}");
    }
    // Without a number of tokens, a text ends where the context does.
    let (status, answer) = server.post("/v1/completions", &json!({"prompt": fits}));
    assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("length")));
    assert_eq!(answer["usage"]["completion_tokens"], 5);
}

#[test]
fn models_metrics_and_what_browsers_ask() {
    let server =
        Server::start(&["--served-model-name", "a/b c", "--allowed-origin", "https://docs.rs"]);
    let get = |path: &str| server.send(&format!("GET {path}"), "");
    let (head, listed) = get("/v1/models");
    assert!(head.contains("access-control-allow-origin: https://docs.rs"), "{head}");
    let listed: Value = serde_json::from_str(&listed).unwrap();
    for path in ["/v1/models/a%2Fb%20c", "/v1/models/a/b%20c"] {
        let (head, one) = get(path);
        assert!(head.contains(" 200 "), "{head}");
        assert_eq!(serde_json::from_str::<Value>(&one).unwrap(), listed["data"][0]);
    }
    let (head, why) = get("/v1/models/another");
    assert!(head.contains(" 404 ") && why.contains("model_not_found"), "{head} {why}");
    assert_eq!(listed["data"][0]["id"], "a/b c");

    let (head, _) = server.send(
        "OPTIONS /v1/completions HTTP/1.1\r\naccess-control-request-headers: x-own\r\nx: ",
        "",
    );
    for words in [" 204 ", "access-control-allow-headers: x-own", "allow-methods: GET, POST"] {
        assert!(head.contains(words), "{head}");
    }

    server.complete(&json!({"prompt": [40, 41, 42]}));
    let (head, text) = get("/metrics");
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    for line in [
        "# TYPE leasehold_generation_tokens_total counter",
        "leasehold_generation_tokens_total 6",
        "leasehold_prompt_tokens_total 3",
        "leasehold_sequences_running 0",
        "leasehold_sequences_ended_total 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
}

#[test]
fn log_probabilities_are_those_of_the_tokens() {
    let server = Server::start(&[]);
    let answer = server.complete(&json!({"logprobs": 2}));
    let (text, found) = (texts(&answer)[0], &answer["choices"][0]["logprobs"]);
    let tokens: Vec<_> =
        found["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!((tokens.len(), tokens.concat().as_str()), (6, text));
    let mut offset = 0;
    for (at, token) in tokens.iter().enumerate() {
        assert_eq!(found["text_offset"][at], offset);
        offset += token.chars().count();
        // Greedily, the chosen token is the most probable one.
        let top = found["top_logprobs"][at].as_object().unwrap();
        let chosen = found["token_logprobs"][at].as_f64().unwrap();
        assert_eq!(top.len(), 2);
        assert_eq!(top[*token], chosen);
        assert!(top.values().all(|value| value.as_f64().unwrap() <= chosen) && chosen < 0.0);
    }
    // In a stream they come with their pieces.
    let body = json!({"prompt": "import os", "max_tokens": 6, "temperature": 0, "logprobs": 2,
        "stream_options": {"include_usage": true}});
    let mut events = server.stream("/v1/completions", body);
    let usage = events.pop().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]), (&json!([]), &answer["usage"]));
    for key in ["tokens", "token_logprobs", "text_offset", "top_logprobs"] {
        let parts = events
            .iter()
            .flat_map(|event| event["choices"][0]["logprobs"][key].as_array().unwrap().clone());
        assert_eq!(parts.collect::<Value>(), found[key], "{key}");
    }
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3,
        "temperature": 0, "logprobs": true, "top_logprobs": 3});
    let (status, answer) = server.post("/v1/chat/completions", &chat);
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    let content = choice["logprobs"]["content"].as_array().unwrap();
    let words: String = content.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!((content.len(), &json!(words)), (3, &choice["message"]["content"]));
    for entry in content {
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 3);
        assert_eq!(entry["top_logprobs"][0]["logprob"], entry["logprob"]);
        assert_eq!(entry["bytes"], json!(entry["token"].as_str().unwrap().as_bytes()));
    }
    // One candidate is the greedy choice.
    let greedy = server.complete(&json!({}));
    for one in [json!({"top_k": 1}), json!({"min_p": 1.0})] {
        let mut more = json!({"temperature": 1.0, "seed": 3});
        more.as_object_mut().unwrap().extend(one.as_object().unwrap().clone());
        assert_eq!(texts(&server.complete(&more)), texts(&greedy), "{one}");
    }
}

/// The bundled model with another template.
fn with_template(template: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let bundled = Path::new(leasehold_llama::demo_model::FOLDER);
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::os::unix::fs::symlink(bundled.join(name), dir.path().join(name)).unwrap();
    }
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    dir
}

#[test]
fn a_template_without_bounds_neither_ends_nor_holds_the_server() {
    let deep = "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    let grows = |what: &str, times: usize| {
        format!(
            "{{% set ns = namespace(x={what}) %}}{{% for i in range({times}) %}}{{% set ns.x = ns.x + ns.x %}}{{% endfor %}}"
        )
    };
    let ready: Vec<(&str, String)> = vec![
        ("plain", "{{ messages[0].content }}".to_owned()),
        ("deep", format!("{deep}{{{{ ns.x }}}}")),
        ("dropped", deep.to_owned()),
        ("lists", grows("[1]", 50) + "{{ ns.x | length }}"),
        ("texts", grows("'a'", 50)),
        ("nested", "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}".to_owned()),
    ];
    // One template, which a message chooses.
    let mut template = String::new();
    for (name, source) in &ready {
        template += &format!("{{% if messages[0].role == '{name}' %}}{source}{{% endif %}}");
    }
    let dir = with_template(&template);
    let server = Server::start(&["--model", dir.path().to_str().unwrap()]);
    let body = |role: &str| json!({"messages": [{"role": role, "content": "Hi"}], "max_tokens": 1});
    for (name, _) in &ready {
        let begin = Instant::now();
        let (status, answer) = server.post("/v1/chat/completions", &body(name));
        let wanted = if matches!(*name, "plain" | "dropped") { 200 } else { 400 };
        // Values without an end on the way out may end the process as well.
        assert!(status == wanted || *name == "dropped" && status == 400, "{name}: {answer}");
        if status == 400 {
            let why = answer["error"]["message"].as_str().unwrap();
            assert!(why.contains("the chat template"), "{name}: {why}");
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "{name}: {:?}", begin.elapsed());
    }
    assert_eq!(server.post("/v1/chat/completions", &body("plain")).0, 200);
    // A client that waits for such a template does not hold the end.
    let _waits = server.open("POST /v1/chat/completions", &body("lists").to_string());
    std::thread::sleep(Duration::from_millis(300));
    assert!(server.end() < Duration::from_secs(30));
}

#[test]
fn a_template_that_cannot_be_read_is_refused_at_the_start() {
    for (template, words) in [
        ("{% for %}".to_owned(), "syntax error"),
        (format!("{{{{ {}1 }}}}", "not ".repeat(100_000)), "nested too deeply"),
        (format!("{{{{ {}1 }}}}", "-".repeat(100_000)), "nested too deeply"),
        (format!("{{{{ 1{} }}}}", "+1".repeat(100_000)), "nested too deeply"),
        ("{% if 1 %}".repeat(10_000), "recursion"),
    ] {
        let dir = with_template(&template);
        let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold-serve"));
        command.args(["--listen", "127.0.0.1:0", "--model"]).arg(dir.path());
        let output = command.output().unwrap();
        let why = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{why}");
        assert!(why.contains("the chat template") && why.contains(words), "{words}: {why}");
    }
}
