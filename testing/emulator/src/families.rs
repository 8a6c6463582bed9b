//! Instructions whose names are made of parts: atomic operations, copies to shared memory by a
//! thread, matrices from shared memory, conversions of pairs; and special registers.
//!
//! This module must not know templates: an operand is an expression of C++ here.

/// Types of atomic operations: PTX's name and that of C++.
const TYPES: [(&str, &str); 8] = [
    ("u32", "unsigned"),
    ("s32", "int"),
    ("b32", "unsigned"),
    ("u64", "unsigned long long"),
    ("s64", "long long"),
    ("b64", "unsigned long long"),
    ("f32", "float"),
    ("f64", "double"),
];

/// Atomic operations: PTX's name, the function, and the types that the instruction has.
const ATOMICS: [(&str, &str, &[&str]); 10] = [
    ("add", "atomicAdd", &["u32", "s32", "u64", "f32", "f64"]),
    ("min", "atomicMin", &["u32", "s32", "u64", "s64"]),
    ("max", "atomicMax", &["u32", "s32", "u64", "s64"]),
    ("inc", "atomicInc", &["u32"]),
    ("dec", "atomicDec", &["u32"]),
    ("and", "atomicAnd", &["b32", "b64"]),
    ("or", "atomicOr", &["b32", "b64"]),
    ("xor", "atomicXor", &["b32", "b64"]),
    ("exch", "atomicExch", &["b32", "b64"]),
    ("cas", "atomicCAS", &["b32", "b64"]),
];

/// Registers of a thread: PTX's name and the expression. Those with a direction have `{}` in it.
const SPECIAL: [(&str, &str); 13] = [
    ("tid", "threadIdx.{}"),
    ("ntid", "blockDim.{}"),
    ("ctaid", "blockIdx.{}"),
    ("nctaid", "gridDim.{}"),
    ("laneid", "emulator::lane()"),
    ("warpid", "emulator::warp()"),
    ("lanemask_eq", "(1u << emulator::lane())"),
    ("lanemask_lt", "((1u << emulator::lane()) - 1)"),
    ("lanemask_le", "((2u << emulator::lane()) - 1)"),
    ("lanemask_gt", "~((2u << emulator::lane()) - 1)"),
    ("lanemask_ge", "~((1u << emulator::lane()) - 1)"),
    ("clock64", "clock64()"),
    ("globaltimer", "clock64()"),
];

/// The expression for a special register, as a template names it.
pub(crate) fn special(text: &str) -> Option<String> {
    let name = text.strip_prefix("%%")?;
    let (name, way) = name.split_once('.').unwrap_or((name, ""));
    let (_, expression) = SPECIAL.iter().find(|(ptx, _)| *ptx == name)?;
    let fits =
        if expression.contains("{}") { matches!(way, "x" | "y" | "z") } else { way.is_empty() };
    fits.then(|| expression.replace("{}", way))
}

/// The call for an instruction, whose operands are expressions of C++. Lists of registers are
/// expressions each. `None` for another instruction.
pub(crate) fn call(opcode: &str, operands: &[String]) -> Option<String> {
    let parts: Vec<&str> = opcode.split('.').collect();
    let nothing = || "emulator::nothing(); ".to_owned();
    match &parts[..] {
        ["atom", parts @ ..] => {
            let (to, from) = operands.split_first()?;
            Some(format!("{to} = {}", atomic(parts, from)?))
        }
        ["red", parts @ ..] => {
            // They give nothing, so they have neither.
            (!parts.contains(&"exch") && !parts.contains(&"cas")).then_some(())?;
            Some(atomic(parts, operands)?)
        }
        ["cp", "async", "commit_group" | "wait_all"] => operands.is_empty().then(nothing),
        ["cp", "async", "wait_group"] => (operands.len() == 1).then(nothing),
        ["cp", "async", "ca" | "cg", "shared", "global", rest @ ..] => {
            // The hint of a cache's lines has no meaning here.
            matches!(rest, [] | ["L2::64B" | "L2::128B" | "L2::256B"]).then_some(())?;
            (3..=4).contains(&operands.len()).then_some(())?;
            Some(format!("emulator::copy_async({}); ", operands.join(", ")))
        }
        ["ldmatrix", "sync", "aligned", "m8n8", count, rest @ ..] => {
            let count: usize = count.strip_prefix('x')?.parse().ok()?;
            let transposed = match rest {
                ["shared", "b16"] => false,
                ["trans", "shared", "b16"] => true,
                _ => return None,
            };
            (matches!(count, 1 | 2 | 4) && operands.len() == count + 1).then_some(())?;
            let (to, at) = operands.split_at(count);
            Some(format!("emulator::load_matrices<{transposed}>({}, {}); ", at[0], to.join(", ")))
        }
        ["cvt", "rn", rest @ ..] => {
            let (function, relu) = match rest {
                [pair @ ("f16x2" | "bf16x2"), "f32"] => (pair, false),
                ["relu", pair @ ("f16x2" | "bf16x2"), "f32"] => (pair, true),
                ["satfinite", pair @ ("e4m3x2" | "e5m2x2"), "f32"] => (pair, false),
                ["satfinite", "relu", pair @ ("e4m3x2" | "e5m2x2"), "f32"] => (pair, true),
                _ => return None,
            };
            let [to, high, low] = operands else { return None };
            Some(format!("{to} = emulator::{function}<{relu}>({high}, {low}); "))
        }
        _ => None,
    }
}

/// An atomic operation: order, scope, space, operation and type; then the address and the values.
fn atomic(parts: &[&str], operands: &[String]) -> Option<String> {
    let (mut parts, mut before, mut behind) = (parts, false, false);
    match parts {
        ["relaxed", rest @ ..] => parts = rest,
        ["acquire", rest @ ..] => (parts, behind) = (rest, true),
        ["release", rest @ ..] => (parts, before) = (rest, true),
        ["acq_rel", rest @ ..] => (parts, before, behind) = (rest, true, true),
        _ => {}
    }
    if let ["cta" | "cluster" | "gpu" | "sys", rest @ ..] = parts {
        parts = rest;
    }
    let shared = match parts {
        ["shared", rest @ ..] => {
            parts = rest;
            true
        }
        ["global", rest @ ..] => {
            parts = rest;
            false
        }
        _ => false,
    };
    let [operation, kind] = parts else { return None };
    let (_, function, kinds) = ATOMICS.iter().find(|(ptx, _, _)| ptx == operation)?;
    let (_, of) = TYPES.iter().find(|(ptx, _)| ptx == kind && kinds.contains(ptx))?;
    let (at, values) = operands.split_first()?;
    (values.len() == if *operation == "cas" { 2 } else { 1 }).then_some(())?;
    let at = if shared { format!("emulator::generic_address({at})") } else { at.clone() };
    let values: Vec<_> = values.iter().map(|v| format!("emulator::of<{of}>({v})")).collect();
    let call = format!("emulator::bits({function}(({of}*)({at}), {}))", values.join(", "));
    let fence = |is: bool| if is { "emulator::fenced(" } else { "" };
    let close = |is: bool| if is { ")" } else { "" };
    // A fence in front is one of the arguments' side.
    Some(match before {
        true => format!("(__threadfence(), {}{call}{}); ", fence(behind), close(behind)),
        false => format!("{}{call}{}; ", fence(behind), close(behind)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn called(opcode: &str, operands: &[&str]) -> Option<String> {
        call(opcode, &operands.iter().map(|&o| o.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn parts_of_a_name_become_a_call() {
        for (opcode, operands, want) in [
            (
                "atom.global.add.f32",
                &["a", "p", "v"][..],
                "a = emulator::bits(atomicAdd((float*)(p), emulator::of<float>(v))); ",
            ),
            (
                "atom.acq_rel.gpu.shared.cas.b64",
                &["a", "p", "c", "v"],
                "a = (__threadfence(), emulator::fenced(emulator::bits(atomicCAS((unsigned long long*)(emulator::generic_address(p)), \
                 emulator::of<unsigned long long>(c), emulator::of<unsigned long long>(v))))); ",
            ),
            (
                "red.release.gpu.global.max.s32",
                &["p", "v"],
                "(__threadfence(), emulator::bits(atomicMax((int*)(p), emulator::of<int>(v)))); ",
            ),
            (
                "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16",
                &["a", "b", "p"],
                "emulator::load_matrices<true>(p, a, b); ",
            ),
            (
                "cp.async.cg.shared.global.L2::128B",
                &["p", "q", "16"],
                "emulator::copy_async(p, q, 16); ",
            ),
            ("cp.async.wait_group", &["0"], "emulator::nothing(); "),
            ("cvt.rn.relu.bf16x2.f32", &["a", "h", "l"], "a = emulator::bf16x2<true>(h, l); "),
        ] {
            assert_eq!(called(opcode, operands).as_deref(), Some(want), "{opcode}");
        }
        assert_eq!(special("%%tid.y").as_deref(), Some("threadIdx.y"));
        assert_eq!(special("%%laneid").as_deref(), Some("emulator::lane()"));
    }

    #[test]
    fn other_parts_are_unknown() {
        for (opcode, operands) in [
            ("atom.global.add.s64", &["a", "p", "v"][..]),
            ("atom.global.add.f32", &["a", "p"]),
            ("atom.local.add.u32", &["a", "p", "v"]),
            ("red.global.exch.b32", &["p", "v"]),
            ("red.global.add.v4.f32", &["p", "v"]),
            ("ldmatrix.sync.aligned.m8n8.x3.shared.b16", &["a", "b", "c", "p"]),
            ("ldmatrix.sync.aligned.m8n8.x1.shared.b8", &["a", "p"]),
            ("cp.async.bulk.commit_group", &[]),
            ("cp.async.ca.shared.global", &["p", "q"]),
            ("cvt.rz.f16x2.f32", &["a", "h", "l"]),
        ] {
            assert_eq!(called(opcode, operands), None, "{opcode}");
        }
        for name in ["%%tid", "%%tid.w", "%%laneid.x", "%%smid", "%tid.x"] {
            assert_eq!(special(name), None, "{name}");
        }
    }
}
