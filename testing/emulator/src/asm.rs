//! Inline PTX as calls of the header's functions: the instructions of a table, with their labels,
//! predicates and registers. A statement with another instruction stays as it is.
//!
//! This module must not know which kernels exist.

use crate::families;
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

/// Types of a warpgroup's product: PTX's name, the header's number, and the columns of the first
/// factor. Those of 16 bits can be transposed.
const ELEMENTS: [(&str, u32, u32); 3] = [("f16", 0, 16), ("bf16", 1, 16), ("tf32", 2, 8)];

/// Instructions as a function of the header: PTX's name without what has no meaning here, how many
/// operands the function assigns, and the function. A place counts as one operand.
const INSTRUCTIONS: [(&str, usize, &str); 65] = [
    ("mbarrier.init.shared.b64", 0, "mbarrier_init"),
    ("mbarrier.inval.shared.b64", 0, "mbarrier_inval"),
    ("mbarrier.arrive.shared.b64", 1, "mbarrier_arrive"),
    ("mbarrier.arrive.shared::cluster.b64", 1, "mbarrier_arrive"),
    ("mbarrier.arrive.expect_tx.shared.b64", 1, "mbarrier_arrive_expect"),
    ("mbarrier.arrive.expect_tx.shared::cluster.b64", 1, "mbarrier_arrive_expect"),
    ("mbarrier.expect_tx.shared.b64", 0, "mbarrier_expect"),
    ("mbarrier.expect_tx.shared::cluster.b64", 0, "mbarrier_expect"),
    ("mbarrier.try_wait.shared.b64", 1, "mbarrier_wait"),
    ("mbarrier.test_wait.shared.b64", 1, "mbarrier_wait"),
    ("mbarrier.try_wait.parity.shared.b64", 1, "mbarrier_wait_parity"),
    ("mbarrier.test_wait.parity.shared.b64", 1, "mbarrier_wait_parity"),
    ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", 0, "bulk_load"),
    ("cp.async.bulk.shared.global.mbarrier::complete_tx::bytes", 0, "bulk_load"),
    (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster",
        0,
        "bulk_load",
    ),
    ("cp.async.bulk.global.shared.bulk_group", 0, "bulk_store"),
    ("cp.async.bulk.tensor.shared::cluster.global.mbarrier::complete_tx::bytes", 0, "tensor_load"),
    ("cp.async.bulk.tensor.shared.global.mbarrier::complete_tx::bytes", 0, "tensor_load"),
    (
        "cp.async.bulk.tensor.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster",
        0,
        "tensor_load",
    ),
    ("cp.async.bulk.tensor.global.shared.bulk_group", 0, "tensor_store"),
    ("cp.async.bulk.commit_group", 0, "bulk_commit"),
    ("cp.async.bulk.wait_group", 0, "bulk_wait"),
    ("cp.async.bulk.wait_group.read", 0, "bulk_wait_read"),
    ("fence.proxy.async", 0, "fence_proxy"),
    ("fence.proxy.async.shared", 0, "fence_proxy"),
    ("fence.proxy.async.shared::cluster", 0, "fence_proxy"),
    ("fence.proxy.async.global", 0, "fence_proxy"),
    ("fence.mbarrier_init", 0, "fence_proxy"),
    ("fence.proxy.tensormap::generic.release.gpu", 0, "nothing"),
    ("fence.proxy.tensormap::generic.acquire.gpu", 0, "nothing"),
    ("prefetch.tensormap", 0, "nothing"),
    ("griddepcontrol.wait", 0, "nothing"),
    ("griddepcontrol.launch_dependents", 0, "nothing"),
    ("wgmma.fence.sync.aligned", 0, "products_fence"),
    ("wgmma.commit_group.sync.aligned", 0, "products_commit"),
    ("wgmma.wait_group.sync.aligned", 0, "products_wait"),
    ("setmaxnreg.inc.sync.aligned.u32", 0, "nothing"),
    ("setmaxnreg.dec.sync.aligned.u32", 0, "nothing"),
    ("elect.sync", 0, "elect"),
    ("barrier.cluster.arrive.aligned", 0, "arrive"),
    ("barrier.cluster.arrive.release.aligned", 0, "arrive"),
    ("barrier.cluster.arrive.relaxed.aligned", 0, "arrive"),
    ("barrier.cluster.wait.aligned", 0, "cluster_wait"),
    ("barrier.cluster.wait.acquire.aligned", 0, "cluster_wait"),
    ("cvta.to.shared.u64", 1, "shared_address"),
    ("cvta.to.shared.u32", 1, "shared_address"),
    ("cvta.shared.u64", 1, "generic_address"),
    ("cvta.to.global.u64", 1, "same"),
    ("mapa.shared::cluster.u32", 1, "mapa"),
    ("mapa.shared::cluster.u64", 1, "mapa"),
    ("cvt.u32.u64", 1, "low"),
    ("cvt.rn.bf16x2.f32", 1, "pair_of_bf16"),
    ("cvt.rn.f16x2.f32", 1, "pair_of_f16"),
    ("mov.b32", 1, "low"),
    ("mov.u32", 1, "low"),
    ("mov.s32", 1, "low"),
    ("mov.b64", 1, "same"),
    ("mov.u64", 1, "same"),
    ("selp.b32", 1, "select"),
    ("selp.u32", 1, "select"),
    ("selp.s32", 1, "select"),
    ("setp.eq.u32", 1, "equal"),
    ("setp.eq.s32", 1, "equal"),
    ("setp.ne.u32", 1, "unequal"),
    ("setp.ne.b32", 1, "unequal"),
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
    let mut constraints = Vec::new();
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
                constraints.push(constraint.trim_matches('"'));
                i = close;
            }
            clobber if clobber.starts_with('"') => {}
            _ => return None,
        }
        i += 1;
    }
    let template = template.replace("\\n", "\n").replace("\\t", " ").replace("\\r", " ");
    let call = product(&template, &operands)
        .or_else(|| instructions(&template, &operands, &constraints, all[at].at))?;
    Some((call, last))
}

/// Registers and labels of a template: their PTX names, and those of C++.
type Names<'a> = Vec<(&'a str, String)>;

/// The statement for a template of instructions that are in the table. `number` is in the names of
/// its labels.
fn instructions(
    template: &str,
    operands: &[String],
    constraints: &[&str],
    number: usize,
) -> Option<String> {
    let lines: Vec<&str> = template.lines().map(|l| l.split("//").next().unwrap_or(l)).collect();
    let template = lines.join(" ").replace("%=", &number.to_string());
    let mut names: Names<'_> = vec![("_", "emulated__".to_owned())];
    let (mut code, mut sums) = (String::new(), Vec::new());
    for part in template.split(';') {
        let mut part = part.trim_start_matches(|c: char| c.is_whitespace() || "{}".contains(c));
        while let Some((label, rest)) = label(part) {
            let _ = write!(code, "emulated_{}_{number}:; ", word(label)?);
            part = rest.trim_start_matches(|c: char| c.is_whitespace() || "{}".contains(c));
        }
        let mut part = part.trim();
        if let Some(registers) = part.strip_prefix(".reg") {
            let (_, registers) = registers.trim().split_once(char::is_whitespace)?;
            for register in registers.split(',').map(str::trim) {
                names.push((register, format!("emulated_{}", word(register)?)));
            }
            continue;
        }
        if let Some(guarded) = part.strip_prefix('@') {
            let (guard, rest) = guarded.split_once(char::is_whitespace)?;
            let (not, guard) = guard.strip_prefix('!').map_or(("", guard), |g| ("!", g));
            let _ = write!(code, "if ({not}{}) ", value(guard, operands.len(), &names)?);
            part = rest.trim();
        }
        if !part.is_empty() {
            let call = if part.starts_with("wgmma.mma_async.") {
                warpgroup_product(part, operands, &names, &mut sums)?
            } else {
                instruction(part, operands.len(), &names, number)?
            };
            code.push_str(&call);
        }
    }
    // Nothing is no access to a register.
    if code.is_empty() {
        return Some("do {} while (0)".to_owned());
    }
    names.sort();
    names.dedup();
    let mut out = String::from("do {");
    for (_, name) in &names {
        let _ = write!(out, " emulator::Register {name} = 0;");
    }
    let mut results = String::new();
    for (i, (operand, constraint)) in std::iter::zip(operands, constraints).enumerate() {
        if sums.contains(&i) {
            continue;
        }
        let from = if constraint.starts_with('=') { "0" } else { operand };
        let _ = write!(out, " emulator::Register emulated_{i} = emulator::bits({from});");
        if constraint.starts_with(['=', '+']) {
            let _ = write!(results, "emulator::assign({operand}, emulated_{i}); ");
        }
    }
    let _ = write!(out, " {code}{results}}} while (0)");
    Some(out)
}

/// The name of a register or label in a name of C++.
fn word(name: &str) -> Option<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "%$_".contains(c);
    (!name.is_empty() && name.chars().all(plain)).then(|| name.replace(['%', '$'], "_"))
}

/// A label in front of an instruction, and what is behind its colon.
fn label(text: &str) -> Option<(&str, &str)> {
    let (label, rest) = text.split_once(':')?;
    let label = label.trim();
    (word(label).is_some() && !rest.starts_with(':')).then_some((label, rest))
}

/// An operand as an expression of C++.
fn value(text: &str, count: usize, names: &Names<'_>) -> Option<String> {
    let text = text.trim();
    if let Some((sum, more)) = text.split_once('+') {
        return Some(format!("({} + {})", value(sum, count, names)?, value(more, count, names)?));
    }
    if let Some((_, name)) = names.iter().find(|(register, _)| *register == text) {
        return Some(name.clone());
    }
    if let Some(place) = text.strip_prefix('{') {
        let each = place.strip_suffix('}')?.split(',').map(|c| value(c, count, names));
        return Some(format!("emulator::Place({})", each.collect::<Option<Vec<_>>>()?.join(", ")));
    }
    let (digits, radix) = text.strip_prefix("0x").map_or((text, 10), |hex| (hex, 16));
    if let Some(register) = families::special(text) {
        return Some(format!("(emulator::Register)({register})"));
    }
    match text {
        "%%cluster_ctarank" => Some("emulator::cluster_rank()".to_owned()),
        "%%cluster_nctarank" => Some("emulator::cluster_size()".to_owned()),
        _ if text.starts_with("%%cluster") => {
            let (what, way) = text.split_once('.')?;
            let function = match what {
                "%%cluster_ctaid" => "__clusterRelativeBlockIdx",
                "%%cluster_nctaid" => "__clusterDim",
                "%%clusterid" => "__clusterIdx",
                _ => return None,
            };
            matches!(way, "x" | "y" | "z").then(|| format!("{function}().{way}"))
        }
        _ => match text.strip_prefix('%') {
            Some(n) => {
                n.parse().ok().filter(|&n: &usize| n < count).map(|n| format!("emulated_{n}"))
            }
            None => i64::from_str_radix(digits, radix).ok().map(|_| text.to_owned()),
        },
    }
}

/// The operands of an instruction: those in brackets, or with a bar between, count as several.
fn operands_of(text: &str) -> Vec<&str> {
    let (mut all, mut from, mut depth) = (Vec::new(), 0, 0_i32);
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' | '|' | '[' | ']' if depth == 0 => {
                all.push(text[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
    }
    all.push(text[from..].trim());
    all.retain(|operand| !operand.is_empty());
    all
}

/// The call for one instruction.
fn instruction(text: &str, count: usize, names: &Names<'_>, number: usize) -> Option<String> {
    let (opcode, rest) = text
        .split_once([' ', '[', '{'])
        .map_or((text, ""), |(opcode, _)| text.split_at(opcode.len()));
    let mut operands = operands_of(rest);
    if let "bra" | "bra.uni" = opcode {
        let [label] = operands[..] else { return None };
        return Some(format!("goto emulated_{}_{number}; ", word(label)?));
    }
    let lists: Option<Vec<String>> = operands
        .iter()
        .flat_map(|o| o.trim_matches(['{', '}']).split(','))
        .map(|o| value(o, count, names))
        .collect();
    if let Some(lists) = lists
        && let Some(call) = families::call(&opcode.replace("shared::cta", "shared"), &lists)
    {
        return Some(call);
    }
    // An order is there in any case.
    let mut name = opcode.replace("shared::cta", "shared");
    for order in ["release", "acquire", "relaxed"] {
        for scope in ["cta", "cluster"] {
            name = name.replace(&format!(".{order}.{scope}"), "");
        }
    }
    if let Some(hinted) = name.strip_suffix(".L2::cache_hint") {
        name = hinted.to_owned();
        operands.pop()?;
    }
    let name = if let Some(rest) = name.strip_prefix("cp.async.bulk.tensor.") {
        let (dimensions, rest) = rest.split_once("d.")?;
        let place = operands.iter().find(|o| o.starts_with('{'))?;
        if place.split(',').count() != dimensions.parse().ok()? {
            return None;
        }
        format!("cp.async.bulk.tensor.{}", rest.replace(".tile", ""))
    } else {
        name
    };
    let (_, assigned, function) = INSTRUCTIONS.iter().find(|(ptx, _, _)| *ptx == name)?;
    let operands: Vec<String> =
        operands.into_iter().map(|o| value(o, count, names)).collect::<Option<_>>()?;
    let (to, from) = operands.split_at_checked(*assigned)?;
    let to = to.first().map_or(String::new(), |to| format!("{to} = "));
    Some(format!("{to}emulator::{function}({}); ", from.join(", ")))
}

/// The call that starts a product of a warpgroup. The numbers of the operands that are its sums go
/// to `sums`: they stay in their variables.
fn warpgroup_product(
    text: &str,
    operands: &[String],
    names: &Names<'_>,
    sums: &mut Vec<usize>,
) -> Option<String> {
    let (name, rest) = text.split_at(text.find([' ', '{'])?);
    let (columns, kind) =
        name.strip_prefix("wgmma.mma_async.sync.aligned.m64n")?.split_once('k')?;
    let kind: Vec<&str> = kind.split('.').collect();
    let [depth, "f32", first, second] = kind[..] else { return None };
    let (_, element, depths) = ELEMENTS.iter().find(|(ptx, _, _)| *ptx == first)?;
    let columns: usize = columns.parse().ok()?;
    let is_shape = columns.is_multiple_of(8) && (8..=256).contains(&columns);
    if first != second || depth.parse() != Ok(*depths) || !is_shape {
        return None;
    }
    let [to, a, rest @ ..] = &operands_of(rest)[..] else { return None };
    let list = |text: &str| -> Option<Vec<usize>> {
        let number =
            |r: &str| r.trim().strip_prefix('%')?.parse().ok().filter(|&n| n < operands.len());
        text.strip_prefix('{')?.strip_suffix('}')?.split(',').map(number).collect()
    };
    let to = list(to)?;
    // A matrix in registers cannot be transposed.
    let in_registers = a.starts_with('{');
    let turns = if *depths == 16 { 2 - usize::from(in_registers) } else { 0 };
    if to.len() != columns / 2 || rest.len() != 4 + turns {
        return None;
    }
    let value =
        |text: &str| Some(format!("(emulator::Register){}", value(text, operands.len(), names)?));
    let mut of = rest.iter().map(|o| value(o)).collect::<Option<Vec<_>>>()?;
    let mut words = "nullptr";
    let mut call = String::from("{ ");
    if in_registers {
        let a = list(a).filter(|a| a.len() == 4)?;
        let a: Vec<String> = a.iter().map(|n| format!("(unsigned)emulated_{n}")).collect();
        let _ = write!(call, "const unsigned emulated_words[] = {{{}}}; ", a.join(", "));
        words = "emulated_words";
        of.insert(0, "0".to_owned());
        of.splice(5..5, (turns > 0).then(|| "0".to_owned()));
    } else {
        of.insert(0, value(a)?);
    }
    of.resize(7, "0".to_owned());
    let places: Vec<String> =
        to.iter().map(|&n| format!("emulator::sum_at({})", operands[n])).collect();
    let _ = write!(
        call,
        "float* const emulated_sums[] = {{{}}}; emulator::start_product({element}, {columns}, emulated_sums, {words}, {{{}}}); }} ",
        places.join(", "),
        of.join(", ")
    );
    sums.extend(to);
    Some(call)
}

/// The call for `mma.sync` of 16 rows and 8 columns.
fn product(template: &str, operands: &[String]) -> Option<String> {
    let template = template.replace('\n', " ");
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
    fn instructions_become_calls_with_their_registers_and_labels() {
        for (template, want) in [
            ("cp.async.bulk.commit_group;", "emulator::bulk_commit();"),
            ("fence.proxy.async.shared::cta;\\n\\t", "emulator::fence_proxy();"),
            (
                "mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], 2;",
                "emulated__ = emulator::mbarrier_arrive(emulated_0, 2);",
            ),
            (
                "{\\n\\t.reg .pred %%p;\\n\\tsetp.ne.b32 %%p, %1, 0;\\n\\t@!%%p bra OUT_%=;\\n\\tmov.b32 %0, 0x10;\\n\\tOUT_%=: }",
                "emulated___p = emulator::unequal(emulated_1, 0); if (!emulated___p) goto emulated_OUT_0_0; emulated_0 = emulator::low(0x10); emulated_OUT_0_0:; emulator::assign(x, emulated_0);",
            ),
            (
                "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%0, %1, 7}], [%0], %1, %1;",
                "emulator::tensor_load(emulated_0, emulated_1, emulator::Place(emulated_0, emulated_1, 7), emulated_0, emulated_1);",
            ),
            (
                "{.reg .b32 r; elect.sync r|_, 0xffffffff; mov.u32 %0, r;}",
                "emulator::elect(emulated_r, emulated__, 0xffffffff);",
            ),
            ("", "do {} while (0)"),
        ] {
            let text =
                format!("asm volatile(\"{template}\" : \"+r\"(x) : \"l\"(y[1]) : \"memory\");");
            let call = translated(&text).unwrap_or_else(|| panic!("{template}"));
            assert!(
                call.contains(want)
                    && (template.is_empty() || call.contains("emulated_1 = emulator::bits(y[1]);")),
                "{call}"
            );
        }
    }

    #[test]
    fn a_product_of_a_warpgroup_adds_to_variables() {
        let text = r#"asm volatile("{.reg .pred add; setp.ne.b32 add, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, add, 1, -1, 0, 1;}" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b), "r"(n));"#;
        let call = translated(text).unwrap();
        let want = "{ float* const emulated_sums[] = {emulator::sum_at(d[0]), emulator::sum_at(d[1]), emulator::sum_at(d[2]), emulator::sum_at(d[3])}; emulator::start_product(1, 8, emulated_sums, nullptr, {(emulator::Register)emulated_4, (emulator::Register)emulated_5, (emulator::Register)emulated_add, (emulator::Register)1, (emulator::Register)-1, (emulator::Register)0, (emulator::Register)1}); }";
        assert!(call.contains(want) && !call.contains("bits(d["), "{call}");
        let text = r#"asm("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32{%0,%0,%0,%0}, {%1,%1,%1,%1}, %2, 1, 1, 1;" : "+f"(d) : "r"(a), "l"(b));"#;
        let call = translated(text).unwrap();
        assert!(call.contains("emulated_words, {0, (emulator::Register)emulated_2, "), "{call}");
    }

    #[test]
    fn what_is_not_in_the_table_stays() {
        for text in [
            "asm(\"wgmma.mma_async.sync.aligned.m64n8k16.f32.e4m3.e4m3 {%0, %0, %0, %0}, %1, %1, 1, 1, 1, 0, 0;\" : \"+f\"(d) : \"l\"(a));",
            "asm(\"wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16 {%0, %0, %0, %0, %0, %0}, %1, %1, 1, 1, 1, 0, 0;\" : \"+f\"(d) : \"l\"(a));",
            "asm(\"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %0, %0}, %1, %1, 1, 1, 1, 0, 0;\" : \"+f\"(d) : \"l\"(a));",
            "asm(\"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %0, %0, %0}, %1, %1, 1, 1, 1;\" : \"+f\"(d) : \"l\"(a));",
            "asm(\"wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%0, %0, %0, %0}, %1, %1, %1, 0, 1, 1, 1, 0, 0;\" : \"+f\"(d) : \"l\"(a));",
            "asm(\"cp.async.bulk.commit_group; membar.gl;\");",
            "asm(\"mov.b32 %0, unknown;\" : \"=r\"(x));",
            "asm(\"mov.b32 %1, 0;\" : \"=r\"(x));",
            "asm(\"cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%0}], [%0];\" :: \"r\"(x));",
            "asm(\"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%0], 16;\" :: \"r\"(x));",
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
