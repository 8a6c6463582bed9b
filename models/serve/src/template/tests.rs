//! Prompts that are equal to those of transformers, with the templates that models have.

use super::*;
use serde_json::Value as Json;

/// The text of a chat, rendered by the template of a directory with these files.
fn render_dir(files: &[(&str, &str)], chat: &str) -> Result<String, String> {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let template = Template::from_dir(dir.path()).map_err(|e| e.to_string())?;
    let template = template.ok_or("no template")?;
    let chat: Value = serde_json::from_str(chat).unwrap();
    let (source, values) = template.task(chat).map_err(|why| why.message)?;
    render(source, &values).map_err(|why| format!("{why:#}"))
}

/// The same of a template in `tokenizer_config.json`, and two messages.
fn render_two(template: &str) -> Result<String, String> {
    let config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>",
        "chat_template": template});
    let chat = json!({"messages": [{"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hello"}]});
    render_dir(&[("tokenizer_config.json", &config.to_string())], &chat.to_string())
}

#[test]
fn forty_talks_are_rendered_as_by_transformers() {
    let folder = Path::new("tests/templates");
    let golden = std::fs::read(folder.join("golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let of = |value: &Value, key: &str| value.get_attr(key).unwrap();
    let config = serde_json::to_string(&of(&golden, "tokens")).unwrap();
    let texts = of(&golden, "texts");
    assert_eq!(texts.len(), Some(3));
    for name in texts.try_iter().unwrap() {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let files = [("tokenizer_config.json", &*config), ("chat_template.jinja", &*source)];
        let talks = of(&golden, "talks").try_iter().unwrap();
        let wanted = texts.get_item(&name).unwrap();
        assert_eq!(wanted.len(), Some(40));
        for (at, (talk, wanted)) in talks.zip(wanted.try_iter().unwrap()).enumerate() {
            let text = render_dir(&files, &serde_json::to_string(&talk).unwrap());
            match wanted.as_str() {
                Some(wanted) => assert_eq!(text.as_deref(), Ok(wanted), "{name}, talk {at}"),
                None => assert!(text.is_err(), "{name}, talk {at}: {text:?}"),
            }
        }
    }
}

/// Templates with a trait each, a chat, and what transformers makes of it.
#[test]
fn what_templates_ask_for_is_as_in_transformers() {
    let user = r#"{"messages": [{"role": "user", "content": "Is 3 < 4 & 5 > 2? Don't: é"}]}"#;
    let plain = "{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}";
    let joined = "user:Name a river in Peru.;";
    let parts = r#"{"messages": [{"role": "user", "content": [
        {"type": "text", "text": "Name a river"}, {"type": "text", "text": " in Peru."}]}]}"#;
    let walked = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}";
    let reads = |template: &str, chat: &str, wanted: &str| {
        assert_eq!(render_dir(&[("chat_template.jinja", template)], chat).as_deref(), Ok(wanted));
    };
    let json = r#"{"role": "user", "content": "Is 3 < 4 & 5 > 2? Don't: é"}"#;
    reads("{{ messages[0] | tojson }}", user, json);
    reads("{{ 'a' + (messages[0] | tojson) + '<b>' }}", user, &format!("a{json}<b>"));
    reads("{{ {'z': 1, 'a': 'é'} | tojson(ensure_ascii=False) }}", user, r#"{"z": 1, "a": "é"}"#);
    reads("{% for key in messages[0] %}{{ key }};{% endfor %}", user, "role;content;");
    reads("{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %}", user, "b1a2");
    let options =
        "{{ {'z': [1, 'é'], 'a': none} | tojson(ensure_ascii=True, indent=1, sort_keys=True) }}";
    reads(options, user, "{\n \"a\": null,\n \"z\": [\n  1,\n  \"\\u00e9\"\n ]\n}");
    reads("{{ [1, {'a': 1e22}] | tojson(separators=(',', ':')) }}", user, "[1,{\"a\":1e+22}]");
    reads("{{ 1e22 }} {{ 0.00001 | string }} {{ 2.0 }} {{ true }}", user, "1e+22 1e-05 2.0 True");
    reads("{{ tools is none }} {{ documents is none }}", user, "True True");
    reads("{{ tools is iterable }} {{ pad_token is defined }}", user, "False False");
    reads(plain, parts, joined);
    let one = r#"{"messages": [{"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Name a river."}]}]}"#;
    reads(plain, one, "system:Be brief.;user:Name a river.;");
    reads("{{ messages[0].content }}", parts, "Name a river in Peru.");
    reads("{{ messages[0].content | trim }}", parts, "Name a river in Peru.");
    reads(walked, parts, "[Name a river][ in Peru.]");
    reads(
        "{{ messages[0].content is string }} {{ messages[0].content[-1].text }}",
        parts,
        "False  in Peru.",
    );
}

#[test]
fn a_date_is_the_days() {
    let year = render_two("{{ strftime_now('%Y') | int > 2020 }}{{ strftime_now('%Y') | length }}");
    assert_eq!(year.as_deref(), Ok("True4"));
    let text = render_two("{{ strftime_now('%d %b %Y, %A') | length > 15 }}");
    assert_eq!(text.as_deref(), Ok("True"));
    let why = render_two("{{ strftime_now('%') }}").unwrap_err();
    assert!(why.contains("strftime_now"), "{why}");
}

#[test]
fn tags_of_a_training_change_nothing() {
    let template = "{% set a = 1 %}{% generation %}{% set a = 2 %}b{%- endgeneration -%} {{ a }}";
    assert_eq!(render_two(template).as_deref(), Ok("b1"));
    let why = render_two("{% generations %}").unwrap_err();
    assert!(why.contains("generations"), "{why}");
}

#[test]
fn messages_are_as_openais_clients_send_them() {
    let render = |template: &str, message: Json| {
        let chat = json!({"messages": [message]}).to_string();
        render_dir(&[("chat_template.jinja", template)], &chat)
    };
    // The arguments of a call are JSON in a text; what is null is absent.
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"id": "1",
        "function": {"name": "add", "arguments": "{\"b\": 1, \"a\": 2}"}}]});
    let template = "{{ messages[0].content is defined }}{{ messages[0].tool_calls[0].function.arguments | tojson }}";
    assert_eq!(render(template, call).as_deref(), Ok("False{\"b\": 1, \"a\": 2}"));
    let thought = json!({"role": "assistant", "content": "a", "reasoning": "b"});
    let template = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}";
    assert_eq!(render(template, thought).as_deref(), Ok("bb"));
    for (message, words) in [
        (json!("Hello"), "an object"),
        (json!({"content": [{"type": "image_url", "image_url": {}}]}), "image_url"),
        (json!({"content": [1]}), "send texts"),
    ] {
        let why = render("{{ messages[0].content }}", message).unwrap_err();
        assert!(why.contains(words), "{why}");
    }
    let why = render_dir(&[("chat_template.jinja", "a")], r#"{"messages": []}"#).unwrap_err();
    assert!(why.contains("one at least"), "{why}");
}

#[test]
fn a_template_of_a_model_gives_its_prompt() {
    let text = render_two(
        "{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}
[{{ message.content.strip().upper() }}]
{%- else %}
<{{ message['role'] }}>{{ message['content'] | trim }}{{ eos_token }}
{%- endif %}
{%- endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}",
    );
    assert_eq!(text.unwrap(), "<s>[BE BRIEF.]<user>Hello</s><assistant>");
}

#[test]
fn a_template_that_fails_says_why_and_one_without_end_is_ended() {
    let deep = format!("{{{{ {}1{} | tojson }}}}", "[".repeat(140), "]".repeat(140));
    for (template, wanted) in [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "fuel"),
        ("{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "write"),
        ("{{ messages[0].tools.name }}", "undefined"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.no_method() }}", "no_method"),
        ("{{ nothing | tojson }}", "undefined has no form"),
        ("{{ 1 | tojson(indents=2) }}", "indents"),
        (&deep, "recursion"),
        ("{% for %}", "syntax error"),
    ] {
        let why = render_two(template).unwrap_err();
        assert!(why.contains(wanted), "{template}: {why}");
    }
}

#[test]
fn a_directory_has_templates_and_tokens_in_several_files() {
    let chat = r#"{"messages": [{}], "tools": null}"#;
    let tools = r#"{"messages": [{}], "tools": [{"name": "a"}]}"#;
    let list = r#"{"bos_token": null, "eos_token": "</s>", "chat_template": [
        {"name": "tool_use", "template": "tools {{ tools[0].name }}"},
        {"name": "default", "template": "{{ bos_token }}{{ eos_token }}{{ sep_token }}"}]}"#;
    let map = r#"{"sep_token": {"content": "<sep>"}, "eos_token": "<end>"}"#;
    let files = [("tokenizer_config.json", list), ("special_tokens_map.json", map)];
    assert_eq!(render_dir(&files[..1], chat).as_deref(), Ok("</s>"));
    assert_eq!(render_dir(&files[..1], tools).as_deref(), Ok("tools a"));
    assert_eq!(render_dir(&files, chat).as_deref(), Ok("<end><sep>"));
    let newer = list.replacen('{', r#"{"added_tokens_decoder": {},"#, 1);
    let newer = [("tokenizer_config.json", &*newer), files[1]];
    assert_eq!(render_dir(&newer, chat).as_deref(), Ok("</s>"));
    // A file of its own replaces them.
    let own = ("chat_template.jinja", "{{ messages | length }}");
    assert_eq!(render_dir(&[files[0], own], tools).as_deref(), Ok("1"));
    let more = ("additional_chat_templates/tool_use.jinja", "more");
    assert_eq!(render_dir(&[files[0], own, more], tools).as_deref(), Ok("more"));
    assert_eq!(render_dir(&[files[0], own, more], chat).as_deref(), Ok("1"));

    assert_eq!(render_dir(&[], chat).unwrap_err(), "no template");
    let only = r#"{"chat_template": [{"name": "tool_use", "template": "a"}]}"#;
    let why = render_dir(&[("tokenizer_config.json", only)], chat).unwrap_err();
    assert!(why.contains("give tools"), "{why}");
    let why = render_dir(&[("tokenizer_config.json", "{")], chat).unwrap_err();
    assert!(why.contains("tokenizer_config.json"), "{why}");
}

#[test]
fn the_bundled_model_has_a_template() {
    let template = std::fs::read_to_string(
        Path::new(leasehold_llama::demo_model::FOLDER).join("chat_template.jinja"),
    )
    .unwrap();
    let text = render_two(&template).unwrap();
    assert_eq!(text, "\"\"\" Be brief. \"\"\"\n\"\"\"Hello\"\"\"\n");
}
