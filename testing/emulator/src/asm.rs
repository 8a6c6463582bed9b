//! Inline PTX as calls of the header's functions: the instructions of a table. A statement with
//! another instruction stays as it is.
//!
//! This module must not know which kernels exist.

use crate::tokens::{Token, closing};
use std::fmt::Write as _;

/// Types of a product's factors: PTX's name, the header's, and the columns of the first factor that
/// one instruction takes.
const FACTORS: [(&str, &str, &[u32]); 5] = [
    ("f16", "F16", &[8, 16]),
    ("bf16", "Bf16", &[8, 16]),
    ("tf32", "Tf32", &[4, 8]),
    ("e4m3", "E4m3", &[32]),
    ("e5m2", "E5m2", &[32]),
];

/// The preprocessed text with calls in the place of statements that are known. `None` without such
/// a statement.
pub(crate) fn translate(text: &str, all: &[Token<'_>]) -> Option<String> {
    let mut out = String::new();
    let mut copied = 0;
    for (i, token) in all.iter().enumerate() {
        if !matches!(token.text, "asm" | "__asm__" | "__asm") {
            continue;
        }
        let Some((call, last)) = statement(text, all, i) else { continue };
        let (file, line) = all[last].place;
        out.push_str(&text[copied..token.at]);
        // The text behind the statement has its own line again.
        let _ = write!(out, "{call}\n# {line} \"{file}\"\n");
        copied = all[last].end();
    }
    if copied == 0 {
        return None;
    }
    out.push_str(&text[copied..]);
    Some(out)
}

/// The call for the statement that begins at `all[at]`, and its closing parenthesis.
fn statement(text: &str, all: &[Token<'_>], at: usize) -> Option<(String, usize)> {
    let volatile = |t: &Token<'_>| matches!(t.text, "volatile" | "__volatile__");
    let open = at + 1 + usize::from(volatile(all.get(at + 1)?));
    if all.get(open)?.text != "(" {
        return None;
    }
    let last = closing(all, open)?;
    let mut i = open + 1;
    let mut template = String::new();
    while let Some(part) = all[i].text.strip_prefix('"') {
        template.push_str(part.strip_suffix('"')?);
        i += 1;
    }
    // The operands of all sections, in PTX's numbering. Behind the third colon are no operands.
    let mut operands = Vec::new();
    let mut colons = 0;
    while i < last {
        match all[i].text {
            ":" => colons += 1,
            "," => {}
            constraint if constraint.starts_with('"') && colons < 3 => {
                let close = closing(all, i + 1).filter(|_| all[i + 1].text == "(")?;
                let expression = &text[all[i + 2].at..all[close].at];
                // A directive of the preprocessor is a line of its own.
                if expression.contains('#') {
                    return None;
                }
                operands.push(expression.replace('\n', " "));
                i = close;
            }
            clobber if clobber.starts_with('"') => {}
            _ => return None,
        }
        i += 1;
    }
    Some((product(&template, &operands)?, last))
}

/// The call for `mma.sync` of 16 rows and 8 columns.
fn product(template: &str, operands: &[String]) -> Option<String> {
    let template = template.replace("\\n", " ").replace("\\t", " ");
    let (name, rest) = template.trim().trim_end_matches(';').split_once([' ', '{'])?;
    let shape = name.strip_prefix("mma.sync.aligned.m16n8k")?;
    let (depth, rest_of_name) = shape.split_once(".row.col.")?;
    let types: Vec<&str> = rest_of_name.split('.').collect();
    let [sum, first, second, addend] = types[..] else { return None };
    let (_, factor, depths) = FACTORS.iter().find(|(ptx, _, _)| *ptx == first)?;
    let sum_type = match sum {
        "f32" => "F32",
        "f16" if matches!(first, "f16" | "e4m3" | "e5m2") => "F16",
        _ => return None,
    };
    let depth: u32 = depth.parse().ok()?;
    if first != second || sum != addend || !depths.contains(&depth) {
        return None;
    }
    // Four lists of registers. The opening bracket of the first may have ended the name.
    let lists: Vec<&str> = rest.split('}').map(|l| l.trim_matches([' ', ',', '{'])).collect();
    let [to, a, b, c, ""] = lists[..] else { return None };
    let registers = |list: &str| -> Option<Vec<&String>> {
        let number = |r: &str| r.trim().strip_prefix('%')?.parse::<usize>().ok();
        list.split(',').map(|r| operands.get(number(r)?)).collect()
    };
    let (to, a, b, c) = (registers(to)?, registers(a)?, registers(b)?, registers(c)?);
    let words = |list: &[&String]| {
        list.iter().map(|e| format!("emulator::word({e})")).collect::<Vec<_>>().join(", ")
    };
    let mut call = format!(
        "do {{ const unsigned emulated_a[] = {{{}}}, emulated_b[] = {{{}}}, emulated_c[] = {{{}}}; \
         unsigned emulated_d[{}]; \
         emulator::product<emulator::{factor}, emulator::{sum_type}, {depth}>(emulated_a, emulated_b, emulated_c, emulated_d);",
        words(&a),
        words(&b),
        words(&c),
        to.len()
    );
    for (n, to) in to.iter().enumerate() {
        let _ = write!(call, " emulator::put({to}, emulated_d[{n}]);");
    }
    call.push_str(" } while (0)");
    Some(call)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::tokens;

    fn translated(text: &str) -> Option<String> {
        translate(text, &tokens(text, "own").unwrap())
    }

    #[test]
    fn a_product_becomes_a_call_and_keeps_the_lines() {
        let text = "# 7 \"k.cu\"\nasm volatile(\"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32\"\n\"{%0, %1, %2, %3}, {%4, %5},\"\n\"{%6}, {%0, %1, %2, %3};\" : \"+f\"(c[0]), \"+f\"(c[1]),\n\"+f\"(c[2]), \"+f\"(c[3]) : \"r\"(a[0]), \"r\"(f(1, 2)), \"r\"(b));\nint x;";
        let call = translated(text).unwrap();
        let all = tokens(&call, "own").unwrap();
        assert!(call.contains("emulator::product<emulator::F16, emulator::F32, 8>"), "{call}");
        assert!(call.contains("emulated_a[] = {emulator::word(a[0]), emulator::word(f(1, 2))}"));
        assert!(call.contains("emulator::put(c[3], emulated_d[3]);"));
        let x = all.iter().find(|t| t.text == "x").unwrap();
        assert_eq!(x.place, ("k.cu", 11));
    }

    #[test]
    fn what_is_not_in_the_table_stays() {
        for text in [
            "asm(\"membar.gl;\");",
            "asm volatile(\"mma.sync.aligned.m16n8k16.row.col.f32.s8.s8.f32 {%0}, {%0}, {%0}, {%0};\" : \"+r\"(x));",
            "asm(\"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0}, {%1}, {%2}, {%9};\" : \"+r\"(x));",
            "asm(\"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0}, {%0}, {%0}, {%0};\" : [name] \"+r\"(x));",
            "asm goto (\"x\");",
            "int asm;",
        ] {
            assert_eq!(translated(text), None, "{text}");
        }
    }
}
