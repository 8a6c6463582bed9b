//! A CUDA C++ source as C++ for the host: the compiler's options, what is not emulated, and a line
//! for each kernel that enters it into a table.
//!
//! The text comes from the preprocessor, so that no macro hides a kernel. The C++ compiler itself
//! finds out what a kernel takes.
//!
//! This module must not know which kernels exist.

use crate::asm;
use crate::elf::Elf;
use crate::kernel::{Kernel, Param};
use crate::tokens::{Token, closing, tokens};
use std::fmt::Write as _;

/// The folder of the emulator's own headers, as the compiler is told.
pub(crate) const HEADERS: &str = "../include";
/// The beginning of a source's own form of a tensor map, which takes the place of the emulator's.
pub(crate) const TENSOR_MAP: &str = "struct CUtensorMap_st";
/// The section with the kernels' table.
const TABLE: &str = "emulated_kernels";
/// The most parameters of a kernel, as the header has it.
const PARAMS: usize = 64;
/// Bytes of a kernel's record: two addresses, the threads, the cluster, the number of parameters,
/// and those.
const RECORD: usize = (36 + PARAMS * 8_usize).next_multiple_of(64);
/// Bytes of shared memory that a launch can ask for, and their alignment.
const DYNAMIC: (u32, u32) = (227 << 10, 1024);

/// Names of what the emulator has not, and how to say so.
const ABSENT: [(&[&str], &str); 6] = [
    (&["asm", "__asm__", "__asm"], "inline PTX"),
    (&["wmma", "nvcuda"], "tensor cores"),
    (&["cooperative_groups"], "cooperative groups"),
    (
        &[
            "cudaTextureObject_t",
            "cudaSurfaceObject_t",
            "tex1D",
            "tex1Dfetch",
            "tex2D",
            "tex2DLod",
            "tex3D",
            "surf1Dread",
            "surf1Dwrite",
            "surf2Dread",
            "surf2Dwrite",
        ],
        "textures and surfaces",
    ),
    (&["__managed__"], "managed variables"),
    (
        &["malloc", "free", "cudaMalloc", "cudaFree", "cudaLaunchKernel"],
        "allocations and launches by a kernel",
    ),
];

/// Headers of the toolkit that the emulator has not, and what they are for.
pub(crate) const ABSENT_HEADERS: [(&str, &str); 4] = [
    ("mma.h", "tensor cores"),
    ("cooperative_groups.h", "cooperative groups"),
    ("cuda/pipeline", "asynchronous copies"),
    ("cuda/barrier", "asynchronous copies"),
];

/// Headers of the toolkit that are there. The names of an empty one are always there.
pub(crate) const PRESENT_HEADERS: [(&str, &str); 10] = [
    ("cuda_runtime.h", ""),
    ("device_launch_parameters.h", ""),
    ("vector_types.h", ""),
    ("vector_functions.h", ""),
    ("math_constants.h", ""),
    ("cuda.h", ""),
    ("cudaTypedefs.h", ""),
    ("cuda_fp16.h", SHORT_FLOATS),
    ("cuda_bf16.h", SHORT_FLOATS),
    ("cuda_fp8.h", SHORT_FLOATS),
];

/// The text of the headers of short floats.
const SHORT_FLOATS: &str = "#include \"short_floats.hpp\"\n";

/// The advice at the end of a refusal.
const CURE: &str =
    "put it between `#ifndef LEASEHOLD_EMULATED` and `#else`, beside a form for the emulator";

/// The text of a header that the emulator has not.
pub(crate) fn absent_header(name: &str, what: &str) -> String {
    format!("#error \"not emulated: {what} (<{name}>); {CURE}\"\n")
}

/// The options for g++ of those for NVIDIA's run-time compiler: macros, folders and headers, and
/// the release of C++. Others are about NVIDIA's code, and have no meaning here.
pub(crate) fn options(given: &[String]) -> Vec<String> {
    const KEPT: [(&str, &str); 8] = [
        ("--define-macro", "-D"),
        ("-D", "-D"),
        ("--undefine-macro", "-U"),
        ("-U", "-U"),
        ("--include-path", "-I"),
        ("-I", "-I"),
        ("--pre-include", "-include"),
        ("-include", "-include"),
    ];
    let mut kept = Vec::new();
    let mut release = "-std=c++17";
    let mut given = given.iter();
    while let Some(option) = given.next() {
        let option = option.trim();
        if option.ends_with("std=c++20") {
            release = "-std=c++20";
        }
        let Some((rest, short)) =
            KEPT.iter().find_map(|(long, short)| Some((option.strip_prefix(long)?, *short)))
        else {
            continue;
        };
        let rest = rest.trim_start_matches(['=', ' ']);
        let value =
            if rest.is_empty() { given.next().map_or("", |next| next.trim()) } else { rest };
        let value = if short == "-I" {
            std::path::absolute(value)
                .map_or_else(|_| value.to_owned(), |p| p.display().to_string())
        } else {
            value.to_owned()
        };
        kept.extend([short.to_owned(), value]);
    }
    kept.push(release.to_owned());
    kept
}

fn at(token: &Token<'_>, why: &str) -> String {
    let (file, line) = token.place;
    format!("{file}:{line}: error: {why}")
}

/// The preprocessed text with a record for each kernel.
///
/// # Errors
/// Instructions that the emulator has not, with their lines; a text without kernels.
pub(crate) fn translate(text: &str) -> Result<String, String> {
    let mut all = tokens(text, HEADERS)?;
    let translated = asm::translate(text, &all);
    let text = translated.as_deref().unwrap_or(text);
    if translated.is_some() {
        all = tokens(text, HEADERS)?;
    }
    let absent: Vec<String> =
        all.iter().enumerate().filter_map(|(i, t)| absent(&all, i, t)).collect();
    if !absent.is_empty() {
        return Err(absent.join("\n"));
    }
    let mut out = String::with_capacity(text.len() + 4096);
    let (mut copied, mut count) = (0, 0);
    let mut params = String::new();
    for (i, marker) in all.iter().enumerate().filter(|(_, t)| t.text == "emulated_kernel") {
        let kernel = kernel(&all, i).ok_or_else(|| {
            at(marker, "the emulator does not understand this __global__ function")
        })?;
        let Some(Found { name, threads, cluster, params: named, end }) = kernel else { continue };
        out.push_str(&text[copied..end]);
        copied = end;
        let _ = write!(
            out,
            " static const emulator::Kernel __attribute__((section(\"{TABLE}\"), used)) \
             emulated_kernel_{count} = {{(void (*)()){name}, emulator::Of<{name}>::call, \
             (unsigned)({threads}), {{emulator::Cluster<{cluster}>::x, emulator::Cluster<{cluster}>::y, emulator::Cluster<{cluster}>::z}}, \
             emulator::Of<{name}>::params}};"
        );
        let each = named.iter().map(|name| format!("\"{name}\", ")).collect::<String>();
        let _ =
            writeln!(params, "static const char* const emulated_params_{count}[] = {{{each}0}};");
        count += 1;
    }
    if count == 0 {
        return Err("no __global__ function is defined".to_owned());
    }
    out.push_str(&text[copied..]);
    let own = "extern \"C\" __attribute__((visibility(\"hidden\"), no_sanitize(\"thread\", \"undefined\")))";
    let table = format!("__start_{TABLE}");
    let each = (0..count).map(|i| format!("emulated_params_{i}, ")).collect::<String>();
    let _ = write!(
        out,
        "\n{params}\
         {own} const char* const* emulator_params(unsigned index) {{ \
         static const char* const* const all[] = {{{each}}}; return all[index]; }}\n\
         extern \"C\" const emulator::Kernel {table}[];\n\
         {own} void emulator_call(unsigned index, const unsigned char* words) {{ \
         {table}[index].call(words); }}\n\
         {own} const unsigned* emulator_cluster(unsigned index) {{ return {table}[index].cluster; }}\n"
    );
    Ok(out)
}

/// The error for a word that the emulator has not, unless it names something of the source's own.
fn absent(all: &[Token<'_>], i: usize, token: &Token<'_>) -> Option<String> {
    let launch = token.text == "<"
        && all
            .get(i + 1..i + 3)?
            .iter()
            .enumerate()
            .all(|(n, t)| t.text == "<" && t.at == token.at + 1 + n);
    if launch {
        return Some(at(token, &format!("not emulated: launches by a kernel (<<<); {CURE}")));
    }
    let (_, what) = ABSENT.iter().find(|(words, _)| words.contains(&token.text))?;
    let near = |n: Option<usize>| n.and_then(|n| all.get(n)).map_or("", |t| t.text);
    let (before, behind) = (near(i.checked_sub(1)), near(Some(i + 1)));
    // A member or a type of the source's own, or a variable with the name of a function.
    let own = matches!(before, "." | "struct" | "class")
        || before == ">" && near(i.checked_sub(2)) == "-"
        || matches!(token.text, "malloc" | "free") && behind != "(";
    (!own).then(|| at(token, &format!("not emulated: {what} ({}); {CURE}", token.text)))
}

/// Words as C++ reads them.
fn joined(words: &[Token<'_>]) -> String {
    let mut text = String::new();
    for (i, word) in words.iter().enumerate() {
        if i > 0 && word.is_name() && words[i - 1].is_name() {
            text.push(' ');
        }
        text.push_str(word.text);
    }
    text
}

/// A kernel that exists: its name, the expressions of its bound and of its cluster, the names of
/// its parameters, and the end of its definition.
struct Found {
    name: String,
    threads: String,
    cluster: String,
    params: Vec<String>,
    end: usize,
}

/// The kernel whose marker is `all[marker]`. `None` inside for a declaration and for a template,
/// which is no kernel. `None` for a text that has another form.
#[expect(clippy::option_option, reason = "not understood is another case than no kernel")]
fn kernel(all: &[Token<'_>], marker: usize) -> Option<Option<Found>> {
    let first = all[..marker].iter().rposition(|t| matches!(t.text, ";" | "{" | "}"));
    let head: Vec<&str> = all[first.map_or(0, |f| f + 1)..marker].iter().map(|t| t.text).collect();
    let template = head.iter().position(|&t| t == "template");
    let behind = |n: usize| template.and_then(|t| head.get(t + n)).copied();
    // `template <…> …` is a template, `template <> …` and `template …` are kernels.
    let is_template = behind(1) == Some("<") && behind(2) != Some(">");
    let instance = template.is_some() && behind(1) != Some("<");

    let mut i = marker;
    let (mut threads, mut cluster) = ("0".to_owned(), String::new());
    // The parameters follow a name; other parentheses belong to an attribute.
    let (name_from, open) = loop {
        i += 1;
        let token = all.get(i)?;
        match token.text {
            ";" | "{" | "}" => return None,
            "alignas" | "decltype" => i = closing(all, i + 1)?,
            "__attribute__" => {
                // They are inside.
                let close = closing(all, i + 1)?;
                let inside =
                    [("emulated_threads", &mut threads), ("emulated_cluster", &mut cluster)];
                for (word, expression) in inside {
                    if let Some(at) = all[i..close].iter().position(|t| t.text == word) {
                        let from = i + at + 1;
                        let to = closing(all, from)?;
                        *expression = joined(&all[from + 1..to]);
                    }
                }
                i = close;
            }
            "(" => {
                let mut from = i.checked_sub(1)?;
                if all[from].text == ">" {
                    let mut depth = 0_u32;
                    from = loop {
                        match all[from].text {
                            ">" => depth += 1,
                            "<" => depth -= 1,
                            _ => {}
                        }
                        if depth == 0 {
                            break from.checked_sub(1)?;
                        }
                        from = from.checked_sub(1)?;
                    };
                }
                if !all[from].is_name() {
                    continue;
                }
                while from >= 3
                    && all[from - 1].text == ":"
                    && all[from - 2].text == ":"
                    && all[from - 3].is_name()
                {
                    from -= 3;
                }
                break (from, i);
            }
            _ => {}
        }
    };
    let mut i = closing(all, open)?;
    let params = params(&all[open + 1..i]);
    let end = loop {
        i += 1;
        match all.get(i)?.text {
            ";" if instance => break i,
            ";" => return Some(None),
            "{" => break closing(all, i)?,
            "(" => i = closing(all, i)?,
            _ => {}
        }
    };
    if is_template {
        return Some(None);
    }
    let name = joined(&all[name_from..open]);
    Some(Some(Found { name, threads, cluster, params, end: all[end].end() }))
}

/// The names of parameters: the last word of each.
fn params(all: &[Token<'_>]) -> Vec<String> {
    let (mut names, mut last, mut depth) = (Vec::new(), "", 0_i32);
    for token in all {
        match token.text {
            "(" | "[" | "{" | "<" => depth += 1,
            ")" | "]" | "}" | ">" => depth -= 1,
            "," if depth == 0 => names.push(std::mem::take(&mut last).to_owned()),
            _ if depth == 0 && token.is_name() => last = token.text,
            _ => {}
        }
    }
    names.push(last.to_owned());
    names
}

/// The dynamic shared memory, as a text of the assembler, under all names that an object file gives
/// it.
pub(crate) fn dynamic(object: &[u8]) -> String {
    let (bytes, align) = DYNAMIC;
    let mut text = format!(".section .tbss,\"awT\",%nobits\n.balign {align}\n");
    let open = Elf::new(object).and_then(|elf| elf.open_thread_locals()).unwrap_or_default();
    for name in open.into_iter().chain(["emulator_dynamic"]) {
        let _ = writeln!(text, ".globl \"{name}\"\n.hidden \"{name}\"\n\"{name}\":");
    }
    let _ = writeln!(text, ".zero {bytes}\n.section .note.GNU-stack,\"\",%progbits");
    text
}

/// The kernels of a compiled library.
///
/// # Errors
/// A library that this module did not prepare.
pub(crate) fn kernels(image: &[u8]) -> Result<Vec<Kernel>, String> {
    let strange = || "the compiled library is not as expected".to_owned();
    let records = Elf::new(image).and_then(|elf| elf.records(TABLE, RECORD)).ok_or_else(strange)?;
    records
        .into_iter()
        .map(|(name, record)| {
            let word = |at: usize| {
                record.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes)
            };
            let count = word(32).filter(|&n| n as usize <= PARAMS).ok_or_else(strange)?;
            let params = (0..count as usize).map(|i| {
                let (offset, size) = (word(36 + i * 8)?, word(40 + i * 8)?);
                Some(Param { offset, size: size & (u32::MAX >> 1), pointer: size >> 31 != 0 })
            });
            Ok(Kernel {
                name: name.unwrap_or_default().to_owned(),
                threads: word(16).filter(|&n| n != 0),
                params: params.collect::<Option<_>>().ok_or_else(strange)?,
            })
        })
        .collect()
}
