//! Products of a warpgroup, beside those of a device and with mistakes.

use crate::cuda::{On, compile_as, operand, read};
use crate::maps::{BF16, Map};
use half::{bf16, f16};
use leasehold_emulator::Emulator;

const KINDS: &str = include_str!("../products.cu");
/// Bytes of shared memory of a product.
const BYTES: usize = 48 << 10;

fn compile(text: &str, options: &[&str], watched: bool) -> Option<Emulator> {
    let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
    compile_as(text, &options, watched).unwrap_or_else(|why| panic!("{why}"))
}

/// Whole numbers from -8 to 7 that are no pattern.
fn number(i: u32, seed: u32) -> f32 {
    let x = (i ^ seed.wrapping_mul(0x9e37_79b1)).wrapping_mul(0x7feb_352d);
    let x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    ((x ^ x >> 16) >> 28) as f32 - 8.0
}

/// Bytes that a kernel finds in shared memory: elements of its type.
fn memory(kernel: &str, seed: u32) -> Vec<u8> {
    let numbers = |bytes: usize| (0..(BYTES / bytes) as u32).map(move |i| number(i, seed));
    if kernel.starts_with("tf32") {
        numbers(4).flat_map(f32::to_le_bytes).collect()
    } else if kernel.starts_with("bf16") {
        numbers(2).flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect()
    } else {
        numbers(2).flat_map(|v| f16::from_f32(v).to_le_bytes()).collect()
    }
}

/// The kernels' `Of`.
fn of([a, b]: [u64; 2], [offset_a, offset_b]: [u32; 2], adds: u32) -> Vec<u8> {
    let words = [offset_a, offset_b, adds, BYTES as u32].map(u32::to_le_bytes);
    [[a, b].map(u64::to_le_bytes).as_flattened(), words.as_flattened()].concat()
}

#[test]
fn products_are_those_of_a_device() {
    let Some(emulator) = compile(KINDS, &[], true) else { return };
    for (n, line) in include_str!("../products.txt").lines().enumerate().skip(1) {
        let words: Vec<&str> = line.split(' ').collect();
        let [kernel, a, b, offset_a, offset_b, adds, seed, want] = words[..] else {
            panic!("{line}")
        };
        let [a, b, want] = [a, b, want].map(|word| u64::from_str_radix(word, 16).unwrap());
        let [offset_a, offset_b, adds, seed] =
            [offset_a, offset_b, adds, seed].map(|word| word.parse::<u32>().unwrap());
        let from = memory(kernel, seed);
        let mut to = vec![0.0_f32; 128 * if kernel.contains("registers") { 4 } else { 16 }];
        On(&emulator, kernel, [1; 3], [128, 1, 1])
            .shared(
                BYTES as u32,
                &[operand(&mut to), read(&from)],
                &of([a, b], [offset_a, offset_b], adds),
                n % 2 == 1,
            )
            .unwrap_or_else(|why| panic!("{line}: {why}"));
        let found = std::iter::zip(0_u32.., &to)
            .map(|(i, v)| (*v as i32 as u32).wrapping_mul(i.wrapping_mul(2_654_435_761) | 1))
            .fold(0, u32::wrapping_add);
        assert_eq!(u64::from(found), want, "{line}");
    }
}

/// The beginning of each body of a kernel with four sums.
const MACROS: &str = r#"
#define ALL for (u32 i = t; i < 1024; i += 128) ((u32*)memory)[i] = 0x3f803f80;
#define READY ALL PROXY; __syncthreads();
#define WORD (8ull << 16 | 16ull << 32)
#define START(A, B) asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 " SUMS_4 ", %4, %5, 1, 1, 1, 0, 0;" \
    : FOUR(0) : "l"(A), "l"(B));
#define PRODUCT START(described(WORD, 0), described(WORD, 2048))
#define OUT x[t] = d[0];
"#;

/// Bodies of a kernel with a warpgroup, and what the emulator tells in both orders, if anything.
const MISTAKES: &[(&str, &str)] = &[
    ("READY FENCE; PRODUCT COMMIT; WAIT(0); OUT", ""),
    ("READY FENCE; PRODUCT PRODUCT COMMIT; PRODUCT COMMIT; WAIT(1); WAIT(0); OUT", ""),
    ("READY FENCE; PRODUCT COMMIT; WAIT(0); d[0] += 1; FENCE; PRODUCT COMMIT; WAIT(0); OUT", ""),
    (
        "READY FENCE; PRODUCT COMMIT; WAIT(0); d[0] += 1; PRODUCT COMMIT; WAIT(0); OUT",
        "whose sums its thread has touched, without wgmma.fence",
    ),
    ("READY PRODUCT COMMIT; WAIT(0); OUT", "a product without wgmma.fence in front"),
    ("READY FENCE; PRODUCT COMMIT; OUT", "it reads a sum of a product that may still run"),
    ("READY FENCE; PRODUCT COMMIT; d[0] = 1; WAIT(0);", "it writes a sum of a product"),
    ("READY FENCE; PRODUCT COMMIT; WAIT(1); OUT", "it reads a sum of a product"),
    ("READY FENCE; PRODUCT WAIT(0); OUT", "it reads a sum of a product"),
    ("READY FENCE; PRODUCT COMMIT;", "a thread ends before its products are over"),
    ("READY FENCE; PRODUCT COMMIT; PRODUCT WAIT(0);", "a thread ends before its products are over"),
    (
        "ALL __syncthreads(); FENCE; PRODUCT COMMIT; WAIT(0);",
        "race: a product reads what the generic proxy wrote, without fence.proxy.async",
    ),
    ("ALL PROXY; FENCE; PRODUCT COMMIT; WAIT(0);", "race: it "),
    ("READY FENCE; PRODUCT COMMIT; memory[t] = 7; WAIT(0);", "race: it "),
    ("READY FENCE; PRODUCT COMMIT; WAIT(0); memory[t] = 7;", ""),
    ("READY FENCE; PRODUCT COMMIT; PRODUCT COMMIT; WAIT(1); memory[t] = 7; WAIT(0);", "race: it "),
    (
        "READY FENCE; if (t < 64) { PRODUCT COMMIT; WAIT(0); }",
        "waits at wgmma.wait_group for others",
    ),
    (
        "READY FENCE; if (t < 16) { PRODUCT COMMIT; WAIT(0); }",
        "wgmma.mma_async that not all 32 threads of a warp reach",
    ),
    (
        "READY FENCE; START(described(WORD, t % 32 / 16 * 16), described(WORD, 2048)) COMMIT; WAIT(0);",
        "wgmma.mma_async with other operands in lane",
    ),
    (
        "READY FENCE; START(described(WORD | 1ull << 49, 0), described(WORD, 0))",
        "not emulated: a matrix descriptor with a base offset",
    ),
    (
        "READY FENCE; START(described(WORD | 1ull << 52, 0), described(WORD, 0))",
        "the bits 0x10000000000000, which have no meaning",
    ),
    ("READY FENCE; START(described(WORD, 0), described(WORD, 3968)) COMMIT; WAIT(0);", ""),
    (
        "READY FENCE; START(described(WORD, 0), described(WORD, 4080)) COMMIT; WAIT(0);",
        "illegal address: 16 bytes at the shared",
    ),
];

#[test]
fn mistakes_are_told() {
    let mut text = format!("{KINDS}\n{MACROS}\n");
    for (i, (body, _)) in MISTAKES.iter().enumerate() {
        text += &format!(
            "extern \"C\" __global__ void f{i}(float* x) {{ const u32 t = threadIdx.x; float d[4] = {{}}; {body} }}\n"
        );
    }
    let Some(emulator) = compile(&text, &[], true) else { return };
    for (i, (body, want)) in MISTAKES.iter().enumerate() {
        for reverse in [false, true] {
            let mut x = [0.0_f32; 128];
            let run = On(&emulator, &format!("f{i}"), [1; 3], [128, 1, 1]).shared(
                4224,
                &[operand(&mut x)],
                &[],
                reverse,
            );
            match run {
                Ok(()) => {
                    assert_eq!(*want, "", "{body}");
                    let products = body.matches("PRODUCT").count() as f32;
                    if body.ends_with("OUT") {
                        assert_eq!(x, [16.0 * products + (x[0] % 16.0); 128], "{body}");
                    }
                }
                Err(why) => assert!(!want.is_empty() && why.contains(want), "{body}: {why}"),
            }
        }
    }
    let mut x = [0.0_f32; 128];
    let why = On(&emulator, "f0", [1; 3], [96, 1, 1])
        .shared(4224, &[operand(&mut x)], &[], false)
        .unwrap_err();
    assert!(why.contains("a product of a warpgroup in a block of 96 threads"), "{why}");
}

#[test]
fn a_product_without_a_wait_is_late_in_one_of_the_orders() {
    let text = format!(
        "{KINDS}\n{MACROS}\nextern \"C\" __global__ void f(float* x) {{ const u32 t = threadIdx.x; float d[4] = {{}};
            READY FENCE; PRODUCT COMMIT; OUT WAIT(0); }}\n"
    );
    let Some(emulator) = compile(&text, &[], false) else { return };
    for (reverse, want) in [(false, 16.0), (true, 0.0)] {
        let mut x = [-1.0_f32; 128];
        On(&emulator, "f", [1; 3], [128, 1, 1])
            .shared(4096, &[operand(&mut x)], &[], reverse)
            .unwrap();
        assert_eq!(x, [want; 128]);
    }
}

/// Changes of the example's ring of stages, and what shows them: a message, or other numbers.
const PLANTED: &[(&str, &str, &str)] = &[
    ("", "", ""),
    ("wait(full[stage], parity);", "", "race: it "),
    ("wait(empty[stage], parity ^ 1);", "", "race: it |1 arrivals at an mbarrier"),
    ("wait_for_products<1>();", "wait_for_products<2>();", "race: it "),
    ("wait_for_products<0>();", "", "it reads a sum of a product that may still run"),
    ("asm volatile(\"wgmma.fence.sync.aligned;\" ::: \"memory\");", "", "without wgmma.fence"),
    ("1ull << 62", "2ull << 62", "other numbers"),
    ("(u64)(1024 >> 4) << 32", "(u64)(512 >> 4) << 32", "other numbers"),
    ("step + k != 0", "k != 0", "other numbers"),
];

#[test]
fn defects_of_a_ring_of_stages_are_found() {
    const RING: &str = include_str!("../../../../examples/multiply_by_maps.cu");
    const SIZES: [u32; 3] = [128, 256, 6 * 64];
    let [rows, columns, depth] = SIZES.map(|n| n as usize);
    let line = |i: usize, seed: u32| -> Vec<f32> {
        (0..depth).map(|k| number((i * depth + k) as u32, seed)).collect()
    };
    let all = |lines: usize, seed: u32| -> Vec<bf16> {
        (0..lines).flat_map(|i| line(i, seed)).map(bf16::from_f32).collect()
    };
    let (x, w) = (all(rows, 1), all(columns, 2));
    for (from, to, want) in PLANTED {
        assert!(RING.contains(from), "{from}");
        let text = if from.is_empty() { RING.to_owned() } else { RING.replacen(from, to, 2) };
        let Some(emulator) = compile(&text, &[], true) else { return };
        for reverse in [false, true] {
            let mut y = vec![bf16::NAN; rows * columns];
            let operands = [read(&x), read(&w), operand(&mut y)];
            let map = |at: u64, lines: u32| {
                Map::new(at, BF16, &[depth as u64, lines.into()], &[64, lines]).swizzled(3)
            };
            let maps = [map(operands[0].at, SIZES[0]), map(operands[1].at, SIZES[1])];
            let sizes = SIZES.map(u32::to_le_bytes);
            let bytes =
                [&[0; 40], maps.map(|m| m.encode()).concat().as_slice(), sizes.as_flattened()]
                    .concat();
            let run = On(&emulator, "multiply_by_maps", [1; 3], [384, 1, 1]).shared(
                4 * 384 * 64 * 2 + 64,
                &operands,
                &bytes,
                reverse,
            );
            match run {
                Err(why) => {
                    let told = want.split('|').any(|want| why.contains(want));
                    assert!(!want.is_empty() && told, "{from} -> {to}: {why}")
                }
                Ok(()) => {
                    let right = (0..4).map(|i| i * 8321).all(|i| {
                        let product = std::iter::zip(line(i / columns, 1), line(i % columns, 2));
                        let sum: f32 = product.map(|(x, w)| x * w).sum();
                        y[i] == bf16::from_f32(sum)
                    });
                    assert_eq!(right, want.is_empty(), "{from} -> {to}");
                    assert!(right || *want == "other numbers", "{from} -> {to}");
                }
            }
        }
    }
}
