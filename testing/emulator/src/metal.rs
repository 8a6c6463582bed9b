//! The text of a Metal library as C++: declarations of threadgroup memory, and a call for each
//! kernel.
//!
//! This module must not know which kernels exist.

use std::fmt::Write as _;

/// A kernel's name, and the C++ expression of each of its arguments.
#[derive(Debug, PartialEq)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    arguments: Vec<String>,
}

impl Kernel {
    /// The branch of the entry that runs this kernel of a namespace.
    pub(crate) fn case(&self, space: &str, index: usize) -> String {
        let Self { name, arguments } = self;
        let mut text = format!("    if (launch->index == {index}) {{\n");
        let _ = writeln!(text, "        using namespace {space};");
        text.push_str("        const emulator::Arguments bound = {launch->words, launch->size};\n");
        let _ = writeln!(
            text,
            "        auto body = [&] {{ {space}::{name}({}); }};",
            arguments.join(", ")
        );
        text.push_str("        return emulator::run(*launch, body);\n    }\n");
        text
    }
}

/// The library's entries, with a branch for each kernel.
pub(crate) fn entry(cases: &str) -> String {
    const OPEN: &str = "extern \"C\" __attribute__((visibility(\"default\")))";
    format!(
        "{OPEN} const char* emulate(emulator::Launch* launch) {{\n{cases}    return \"no such kernel\";\n}}\n\
         {OPEN} void emulated_end() {{ emulator::end(); }}\n"
    )
}

/// The library's text, with threadgroup memory that the emulator fills, and the kernels.
pub(crate) fn translate(text: &str) -> Result<(String, Vec<Kernel>), String> {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        // An array that a kernel declares: `threadgroup TYPE NAME[SIZE];`. C++ has no variables of
        // another address space on the stack.
        let declared = line.trim_start().strip_prefix("threadgroup ");
        let is_array = |d: &&str| {
            d.ends_with("];")
                && d.split_once('[').is_some_and(|(t, _)| !t.contains(['*', '(', '=']))
        };
        match declared.filter(is_array) {
            Some(array) => {
                let _ = writeln!(out, "static EMULATED_SHARED threadgroup {array}");
            }
            None => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    let bare: String =
        text.lines().flat_map(|l| [l.split("//").next().unwrap_or_default(), "\n"]).collect();
    let mut kernels = Vec::new();
    for definition in bare.split("kernel void ").skip(1) {
        let (name, rest) = definition.split_once('(').ok_or("a kernel without parameters")?;
        let parameters = enclosed(rest).ok_or("a kernel's parameters do not end")?;
        let arguments = parameters.iter().map(|p| argument(p)).collect::<Result<_, _>>();
        let arguments = arguments.map_err(|why| format!("kernel {name}: {why}"))?;
        kernels.push(Kernel { name: name.trim().to_owned(), arguments });
    }
    Ok((out, kernels))
}

/// The parts, between commas, of a text up to its closing parenthesis.
fn enclosed(text: &str) -> Option<Vec<&str>> {
    let (mut depth, mut from, mut parts) = (0_u32, 0, Vec::new());
    for (i, c) in text.char_indices() {
        match c {
            '(' | '[' | '<' => depth += 1,
            ')' if depth == 0 => {
                parts.push(&text[from..i]);
                return Some(parts);
            }
            ')' | ']' | '>' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[from..i]);
                from = i + 1;
            }
            _ => {}
        }
    }
    None
}

/// The value of a parameter: `TYPE NAME [[ATTRIBUTE]]`.
fn argument(parameter: &str) -> Result<String, String> {
    let parameter = parameter.trim();
    let (declared, attribute) = parameter
        .strip_suffix("]]")
        .and_then(|p| p.split_once("[["))
        .ok_or_else(|| format!("{parameter:?} has no attribute"))?;
    let declared = declared.trim();
    let name = declared.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |i| i + 1);
    let ty = declared[..name].trim();
    let index = attribute.strip_prefix("buffer(").and_then(|a| a.strip_suffix(')'));
    match (index, ty.strip_suffix('&'), ty.ends_with('*')) {
        (Some(i), None, true) => Ok(format!("({ty})bound.buffer({i})")),
        (Some(i), Some(of), false) => Ok(format!("*({of}*)bound.bytes_at({i}, sizeof({of}))")),
        (None, None, false) => {
            // A position has three numbers, an index one, as in Metal.
            let triple = attribute.ends_with("_grid") || attribute.ends_with("per_threadgroup");
            if ty != if triple { "uint3" } else { "uint" } {
                return Err(format!("{attribute} is no {ty}"));
            }
            Ok(format!("emulator::{attribute}()"))
        }
        _ => Err(format!("{parameter:?} is neither a buffer nor a position")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_a_call_with_its_attributes() {
        let text = "struct P { uint n; };\n// kernel void none(\n\
            [[max_total_threads_per_threadgroup(32)]]\n\
            kernel void f(device const uchar* x [[buffer(0)]], constant P& p [[buffer(1)]],\n\
            uint3 g [[threadgroup_position_in_grid]], uint i [[thread_index_in_threadgroup]]) {\n\
            \x20   threadgroup float s[8];\n    threadgroup float* at = s;\n}\n";
        let (out, kernels) = translate(text).unwrap();
        assert!(out.contains("static EMULATED_SHARED threadgroup float s[8];"), "{out}");
        assert!(out.contains("\n    threadgroup float* at = s;"), "{out}");
        let arguments = [
            "(device const uchar*)bound.buffer(0)",
            "*(constant P*)bound.bytes_at(1, sizeof(constant P))",
            "emulator::threadgroup_position_in_grid()",
            "emulator::thread_index_in_threadgroup()",
        ];
        let arguments = arguments.map(str::to_owned).to_vec();
        assert_eq!(kernels, [Kernel { name: "f".to_owned(), arguments }]);
    }

    #[test]
    fn parameters_without_a_meaning_are_refused() {
        for parameter in [
            "uint i",
            "uint i [[buffer(0)]]",
            "device uchar* x [[thread_index_in_threadgroup]]",
            "uint3 i [[thread_index_in_threadgroup]]",
            "uint g [[threadgroup_position_in_grid]]",
        ] {
            let why = translate(&format!("kernel void f({parameter}) {{}}")).unwrap_err();
            assert!(why.contains("kernel f"), "{why}");
        }
    }
}
