//! Chat templates as models have them, and those that would never end.

use leasehold_serve::template::Template;
use serde_json::{Value, json};

/// What a template makes of two messages, or its error.
fn render(template: &str) -> Result<String, String> {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>",
        "chat_template": [{"name": "other", "template": ""}, {"name": "default", "template": template}]});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let template = Template::from_dir(dir.path()).map_err(|e| e.to_string())?.unwrap();
    assert_eq!(template.bos.as_deref(), Some("<s>"));
    let messages: [Value; 2] = [
        json!({"role": "system", "content": " Be brief. "}),
        json!({"role": "user", "content": "Hello"}),
    ];
    template.render(&messages).map_err(|failure| {
        assert_eq!(failure.status, 400);
        failure.message
    })
}

#[test]
fn a_template_of_a_model_gives_its_prompt() {
    let text = render(
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
    for (template, wanted) in [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "fuel"),
        ("{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "more than 8388608 bytes"),
        ("{{ messages[0].tools.name }}", "undefined"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.no_method() }}", "no_method"),
        ("{% for %}", "no template"),
    ] {
        let why = render(template).unwrap_err();
        assert!(why.contains(wanted), "{template}: {why}");
    }
}

#[test]
fn a_directory_may_have_no_template_or_a_file_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    assert!(Template::from_dir(dir.path()).unwrap().is_none());
    std::fs::write(dir.path().join("chat_template.jinja"), "{{ messages | length }}").unwrap();
    let template = Template::from_dir(dir.path()).unwrap().unwrap();
    assert_eq!(template.render(&[Value::Null]).unwrap(), "1");
    std::fs::write(dir.path().join("tokenizer_config.json"), "{").unwrap();
    let why = Template::from_dir(dir.path()).unwrap_err().to_string();
    assert!(why.contains("tokenizer_config.json"), "{why}");
}
