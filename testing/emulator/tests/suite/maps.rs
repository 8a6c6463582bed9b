//! Tensor maps, mbarriers and bulk copies, against a slow model and results of the host.

use crate::cuda::{On, compile_as, operand, read};
use leasehold_emulator::{Emulator, Operand};

const KINDS: &str = include_str!("../maps.cu");

fn compile(text: &str, options: &[&str]) -> Option<Emulator> {
    compile_watched(text, options, true)
}

fn compile_watched(text: &str, options: &[&str], watched: bool) -> Option<Emulator> {
    let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
    compile_as(text, &options, watched).unwrap_or_else(|why| panic!("{why}"))
}

/// A tensor map before it is encoded.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Map {
    device: u64,
    element: u8,
    rank: usize,
    sizes: [u64; 5],
    strides: [u64; 5],
    boxes: [u32; 5],
    steps: [u32; 5],
    interleave: u8,
    swizzle: u8,
    nan: bool,
}

const U32: u8 = 2;
const F32: u8 = 7;
pub(crate) const BF16: u8 = 9;
const TF32: u8 = 11;

impl Map {
    /// A tensor without gaps.
    pub(crate) fn new(device: u64, element: u8, sizes: &[u64], boxes: &[u32]) -> Self {
        let rank = sizes.len();
        let mut map = Self { device, element, rank, ..Self::default() };
        (map.sizes, map.boxes, map.steps) = ([1; 5], [1; 5], [1; 5]);
        map.sizes[..rank].copy_from_slice(sizes);
        map.boxes[..rank].copy_from_slice(boxes);
        map.strides[0] = map.bytes() as u64;
        for d in 1..rank {
            map.strides[d] = map.strides[d - 1] * map.sizes[d - 1];
        }
        map
    }

    pub(crate) fn swizzled(self, swizzle: u8) -> Self {
        Self { swizzle, ..self }
    }

    /// Bytes of an element, or of a slice of an interleaved layout.
    fn bytes(&self) -> usize {
        if self.interleave > 0 {
            return 8 << self.interleave;
        }
        [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4][usize::from(self.element)]
    }

    fn count(&self, d: usize) -> usize {
        match self.interleave {
            0 if d == 0 => self.boxes[0] as usize,
            // A box has one slice.
            1.. if d + 2 == self.rank => 1,
            _ => self.boxes[d].div_ceil(self.steps[d]) as usize,
        }
    }

    /// Bytes from row to row of a box in shared memory: a swizzle takes its whole width.
    fn pitch(&self) -> usize {
        if self.swizzle == 0 || self.interleave > 0 {
            self.count(0) * self.bytes()
        } else {
            16 << self.swizzle
        }
    }

    /// Bytes of a box in shared memory.
    fn room(&self) -> usize {
        (1..5).map(|d| self.count(d)).product::<usize>() * self.pitch()
    }

    /// The bytes of the simulated driver.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.sizes.iter().flat_map(|v| v.to_le_bytes()).collect();
        bytes.extend(self.strides[1..].iter().flat_map(|v| v.to_le_bytes()));
        bytes.extend(self.boxes.iter().chain(&self.steps).flat_map(|v| v.to_le_bytes()));
        let rank = self.rank as u8;
        bytes.extend([
            self.element,
            rank,
            self.interleave,
            self.swizzle,
            0,
            u8::from(self.nan),
            0x4d,
            0x54,
        ]);
        bytes.extend(self.device.to_le_bytes());
        bytes
    }

    /// Calls `f` for each element of a box with its place in shared memory, whose first byte has
    /// the address `from`, and that in the tensor.
    fn each(&self, first: [i32; 5], from: usize, mut f: impl FnMut(usize, Option<usize>)) {
        for n in 0..(0..5).map(|d| self.count(d)).product() {
            let (mut rest, mut inside, mut place) = (n, true, 0);
            for (d, &first) in first.iter().enumerate() {
                let has_step = d > 0 || self.interleave > 0;
                let step = if has_step { i64::from(self.steps[d]) } else { 1 };
                let k = i64::from(first) + (rest % self.count(d)) as i64 * step;
                rest /= self.count(d);
                inside &= k >= 0 && k < self.sizes[d] as i64;
                place += k * self.strides[d] as i64;
            }
            let (row, byte) = (n / self.count(0), n % self.count(0) * self.bytes());
            // Slices have several pieces of 16 bytes.
            for byte in (0..self.bytes()).step_by(16).map(|b| byte + b) {
                let at = from + row * self.pitch() + byte;
                // Bits 4 to 6 change by bits 7 to 9.
                let moved = at ^ ((at >> 7 & [0, 1, 3, 7][usize::from(self.swizzle)]) << 4);
                f(moved, inside.then_some(place as usize + byte % self.bytes()));
            }
        }
    }
}

/// The parameters behind two pointers: maps at the next multiple of 64, and other bytes.
fn params(maps: &[Map], others: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 48];
    bytes.extend(maps.iter().flat_map(Map::encode));
    bytes.extend(others);
    bytes
}

/// The kernels' `Where`.
fn place(map: &Map, first: [i32; 5], offset: usize, total: usize) -> Vec<u8> {
    let bytes = (0..5).map(|d| map.count(d)).product::<usize>() * map.bytes();
    let words = [map.rank, offset, bytes, total].map(|v| (v as u32).to_le_bytes());
    [first.map(i32::to_le_bytes).as_flattened(), words.as_flattened()].concat()
}

/// Numbers that are no pattern.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn map(&mut self) -> Map {
        let element = self.below(13) as u8;
        let rank = 1 + self.below(5) as usize;
        let mut map = Map::new(0, element, &[1; 5][..rank], &[1; 5][..rank]);
        map.swizzle = self.below(4) as u8;
        map.interleave = if rank < 3 { 0 } else { self.below(6).saturating_sub(3) as u8 };
        map.strides[0] = map.bytes() as u64;
        map.nan = element >= 6 && self.below(2) == 1;
        let pieces = 1 + self.below([4, 2, 4, 8][usize::from(map.swizzle)]);
        map.boxes[0] = ((pieces * 16) as u32 / map.bytes() as u32).max(1);
        if map.interleave > 0 {
            map.steps[0] = 1 + self.below(3) as u32;
        }
        map.sizes[0] = 1 + self.below(2 * u64::from(map.boxes[0]));
        let mut end = (map.sizes[0] * map.strides[0]).next_multiple_of(32);
        for d in 1..rank {
            map.sizes[d] = 1 + self.below(5);
            map.boxes[d] = 1 + self.below(4) as u32;
            map.steps[d] = 1 + self.below(3) as u32;
            map.strides[d] = end + 32 * self.below(2);
            end = map.strides[d] * map.sizes[d];
        }
        map
    }
}

#[test]
fn boxes_are_those_of_a_slow_model() {
    let Some(emulator) = compile(KINDS, &[]) else { return };
    let mut numbers = Numbers(7);
    let operand_of = |list: &[u8], device| Operand { device, ..read(list) };
    for round in 0..300 {
        let map = Map { device: 0x7000_0000_0100, ..numbers.map() };
        let device = map.device - 256;
        let reach = |d: usize| (map.sizes[d] - 1) * map.strides[d];
        let extent = (0..5).map(reach).sum::<u64>() as usize + map.bytes();
        let mut tensor: Vec<u8> = (0..256 + extent).map(|_| numbers.below(256) as u8).collect();
        if map.element >= TF32 && round % 4 == 0 {
            // Halves of a last place.
            tensor.chunks_exact_mut(4).for_each(|f| (f[0], f[1]) = (0, f[1] & 0xf0));
        }
        let first: [i32; 5] = std::array::from_fn(|d| {
            let (size, side) = (map.sizes[d] as i64, i64::from(map.boxes[d]));
            let at = numbers.below((size + 2 * side) as u64) as i64 - side;
            // The innermost is a multiple of 16 bytes.
            let least = if d == 0 { (16 / map.bytes() as i64).max(1) } else { 1 };
            if d < map.rank { (at / least * least) as i32 } else { 0 }
        });
        let offset = 128 * numbers.below(9) as usize;
        let total = (offset + map.room()).next_multiple_of(128);
        let params = self::params(&[map], &place(&map, first, offset, total));
        let reverse = round % 2 == 1;

        let mut want = vec![0xee; total];
        let outside = if map.nan { [0xf7, 0x7f].repeat(8) } else { vec![0; 16] };
        map.each(first, offset, |to, from| {
            let to = &mut want[to..to + map.bytes().min(16)];
            to.copy_from_slice(&from.map_or(&outside[..], |f| &tensor[256 + f..])[..to.len()]);
            if map.element >= TF32 && from.is_some() {
                for to in to.chunks_exact_mut(4) {
                    let bits = tf32(u32::from_le_bytes((&*to).try_into().unwrap()));
                    to.copy_from_slice(&bits.to_le_bytes());
                }
            }
        });
        let mut out = vec![0; total];
        On(&emulator, "load_box", [1; 3], [40, 1, 1])
            .shared(
                total as u32,
                &[operand(&mut out), operand_of(&tensor, device)],
                &params,
                reverse,
            )
            .unwrap_or_else(|why| panic!("{map:?} {first:?}: {why}"));
        assert!(out == want, "{map:?} {first:?} {offset}");

        let shared: Vec<u8> = (0..total).map(|_| numbers.below(256) as u8).collect();
        let mut want = tensor.clone();
        let first = first.map(|v| v.max(0));
        let params = self::params(&[map], &place(&map, first, offset, total));
        map.each(first, offset, |from, to| {
            let Some(to) = to else { return };
            let bytes = map.bytes().min(16);
            want[256 + to..][..bytes].copy_from_slice(&shared[from..from + bytes]);
        });
        let to = Operand { device, ..operand(&mut tensor) };
        On(&emulator, "store_box", [1; 3], [40, 1, 1])
            .shared(total as u32, &[to, read(&shared)], &params, reverse)
            .unwrap_or_else(|why| panic!("{map:?} {first:?}: {why}"));
        assert!(tensor == want, "{map:?} {first:?} {offset}");
    }
}

#[test]
fn a_copy_without_a_wait_is_late_in_one_of_the_orders() {
    let Some(emulator) = compile_watched(KINDS, &["-DNO_WAIT"], false) else { return };
    let x = vec![1_u8; 256];
    let map = Map::new(read(&x).at, 0, &[256], &[256]);
    let params = params(&[map], &place(&map, [0; 5], 0, 256));
    let ran = [false, true].map(|reverse| {
        let mut y = vec![0_u8; 256];
        let on = On(&emulator, "load_box", [1; 3], [1; 3]);
        (on.shared(256, &[operand(&mut y), read(&x)], &params, reverse), y)
    });
    assert_eq!(ran[0], (Ok(()), x));
    let (late, y) = &ran[1];
    assert!(late.as_ref().is_err_and(|why| why.contains("for which no thread waits")), "{late:?}");
    assert_eq!(*y, [0xee; 256]);
}

/// The bits of an `f32` after a load in the kinds of `tf32`.
fn tf32(bits: u32) -> u32 {
    let float = f32::from_bits(bits);
    if float.is_nan() {
        return 0x7fff_e000;
    }
    // 2^13 units of the last place are one of the result's.
    let (sign, units) = (bits >> 31 << 31, f64::from(bits << 1 >> 1) / 8192.0);
    sign | (units.round_ties_even() as u32) << 13
}

/// The transpose of 64 rows of 96 numbers.
fn transpose(options: &[&str], watched: bool, reverse: bool) -> Option<Result<bool, String>> {
    let emulator = compile_watched(KINDS, options, watched)?;
    let x: Vec<f32> = (0..64 * 96).map(|i| i as f32).collect();
    let mut y = vec![0.0_f32; x.len()];
    let operands = [operand(&mut y), Operand { device: 1 << 40, ..read(&x) }];
    let from = Map { swizzle: 3, ..Map::new(1 << 40, F32, &[96, 64], &[32, 32]) };
    let to = Map::new(operands[0].at, F32, &[64, 96], &[32, 32]);
    let others = [2.0_f32.to_le_bytes().as_slice(), &[0; 60]].concat();
    let ran = On(&emulator, "transpose_boxes", [3, 2, 1], [64, 1, 1]).run(
        &operands,
        &params(&[from, to], &others),
        reverse,
    );
    Some(ran.map(|()| (0..y.len()).all(|i| y[i] == 2.0 * x[i % 64 * 96 + i / 64])))
}

#[test]
fn a_transpose_by_swizzled_boxes_with_maps_in_a_structure() {
    for reverse in [false, true] {
        let Some(right) = transpose(&[], true, reverse) else { return };
        assert_eq!(right, Ok(true));
        let why = transpose(&["-DNO_PROXY_FENCE"], true, reverse).unwrap().unwrap_err();
        assert!(why.contains("wrote, without fence.proxy.async between the two"), "{why}");
        for watched in [false, true] {
            let options = &["-DNO_READ_WAIT"];
            let why = transpose(options, watched, reverse).unwrap().unwrap_err();
            assert!(why.contains("before its bulk stores have read shared memory"), "{why}");
            let options = &["-DNO_READ_WAIT", "-DOVERWRITTEN"];
            let why = transpose(options, watched, reverse).unwrap().unwrap_err();
            let want =
                if watched { "race: it writes shared memory that a bulk copy" } else { "ends" };
            assert!(why.contains(want), "{why}");
        }
        assert_eq!(transpose(&["-DOVERWRITTEN"], true, reverse).unwrap(), Ok(true));
    }
}

#[test]
fn a_pipeline_of_copies_and_one_through_shared_memory() {
    for (options, watched) in [
        (&[][..], true),
        (&["-DNO_FULL"][..], true),
        (&["-DNO_EMPTY"], true),
        (&["-DNO_FULL"], false),
    ] {
        let Some(emulator) = compile_watched(KINDS, options, watched) else { return };
        let x: Vec<u32> = (0..256 * 7).map(|i| i * i).collect();
        let want: Vec<u32> = (0..64)
            .map(|t| x.iter().skip(t).step_by(64).fold(0_u32, |all, v| all.wrapping_add(*v)))
            .collect();
        let ran = [false, true].map(|reverse| {
            let mut sums = [0_u32; 64];
            let operands = [operand(&mut sums), read(&x)];
            On(&emulator, "pipeline", [1; 3], [96, 1, 1])
                .run(&operands, &7_u32.to_le_bytes(), reverse)
                .map(|()| sums.as_slice() == want)
        });
        match (options, watched) {
            ([], _) => assert_eq!(ran, [Ok(true), Ok(true)]),
            (_, true) => assert!(ran.iter().all(Result::is_err), "{options:?}: {ran:?}"),
            // A copy that runs as late as it may is missed.
            _ => assert!(ran.iter().any(|r| *r != Ok(true)), "{ran:?}"),
        }
        let mut y = vec![0; x.len()];
        for reverse in [false, true] {
            On(&emulator, "through", [1; 3], [40, 1, 1])
                .shared(4096, &[operand(&mut y), read(&x)], &4096_u32.to_le_bytes(), reverse)
                .unwrap();
            assert_eq!((y[0], &y[1..1024], y[1024]), (x[0] + 1, &x[1..1024], 0));
        }
    }
}

#[test]
fn a_multicast_reaches_all_blocks_of_a_cluster() {
    let Some(emulator) = compile(KINDS, &[]) else { return };
    let x: Vec<u32> = (0..32 * 8).map(|i| i * 3).collect();
    for reverse in [false, true] {
        let mut y = vec![0_u32; 32 * 8 * 4];
        let operands = [operand(&mut y), read(&x)];
        let map = Map::new(operands[1].at, U32, &[32, 8], &[32, 1]);
        On(&emulator, "multicast", [8, 1, 1], [32, 1, 1])
            .run(&operands, &params(&[map], &[]), reverse)
            .unwrap();
        for (block, rows) in y.chunks_exact(128).enumerate() {
            assert_eq!(rows, &x[block / 4 * 128..][..128], "block {block}");
        }
    }
}

#[test]
fn mistakes_are_told() {
    let (macros, bodies) = include_str!("../mistakes.txt").split_once("\n\n").unwrap();
    let mut text = format!("{KINDS}\n{macros}\n");
    let bodies: Vec<_> = bodies.lines().map(|l| l.split_once(" =>").unwrap()).collect();
    for (i, (body, _)) in bodies.iter().enumerate() {
        text += &format!(
            "extern \"C\" __global__ void f{i}(u32* x, const __grid_constant__ CUtensorMap map) {{
                __shared__ __align__(128) u32 box[1024]; __shared__ u64 full; u32 t = threadIdx.x; {body} }}\n"
        );
    }
    let Some(emulator) = compile(&text, &[]) else { return };
    for (i, (body, want)) in bodies.iter().enumerate() {
        let want = want.trim();
        for reverse in [false, true] {
            let mut x: Vec<u32> = (1..1025).collect();
            let operands = [operand(&mut x)];
            let map = Map::new(operands[0].at, U32, &[32, 32], &[32, 32]);
            let ran = On(&emulator, &format!("f{i}"), [1; 3], [64, 1, 1]).run(
                &operands,
                &[&[0; 56], &*map.encode()].concat(),
                reverse,
            );
            match ran {
                Ok(()) => assert_eq!(want, "", "{body}"),
                Err(why) => assert!(!want.is_empty() && why.contains(want), "{body}: {why}"),
            }
        }
    }
}

#[test]
fn maps_that_no_launch_can_use_are_told() {
    let Some(emulator) = compile(KINDS, &[]) else { return };
    let x = vec![1_u8; 1024];
    let good = Map::new(read(&x).at, U32, &[16, 16], &[16, 4]);
    let behind = (good.device + 64).to_le_bytes();
    let former = "kernel load_box: a tensor map with the address 0x";
    for (at, bytes, want) in [
        (126, &[0x7f_u8][..], former),
        (120, &behind, "of 1024 bytes from byte 64 of binding 1 on, which has 1024"),
        (40, &[128], "of 1984 bytes from byte 0 of binding 1"),
        (40, &[72], "whose dimension 1 no driver accepts"),
        (3, &[0x90], "beyond 2^31 a device ends a copy by an illegal instruction"),
        (76, &[0], "whose dimension 1 no driver accepts"),
        (96, &[9], "whose dimension 1 no driver accepts"),
        (72, &[3], "whose box has rows of 12 bytes"),
        (115, &[1], "whose box has rows of 64 bytes"),
        (115, &[4], "not emulated: a tensor map with the swizzle mode 4"),
        (112, &[13], "not emulated: a tensor map of the data type 13"),
        (113, &[1], "a copy of 2 dimensions by a tensor map of 1"),
        (114, &[1], "a tensor map whose interleaved layout no driver accepts"),
        (119, &[0], "a tensor map that no driver has encoded"),
        (120, &[8], "of an address that is no multiple of 16"),
        (118, &[0x4d], "it writes binding 1 at byte 0, which the launch binds to be read only"),
    ] {
        let mut map = good.encode();
        map[at..at + bytes.len()].copy_from_slice(bytes);
        let kernel = if want.contains("read only") { "store_box" } else { "load_box" };
        let mut out = vec![0_u8; 1024];
        let bytes = [&[0; 48], map.as_slice(), &place(&good, [0; 5], 0, 1024)].concat();
        let why = On(&emulator, kernel, [1; 3], [32, 1, 1])
            .shared(1024, &[operand(&mut out), read(&x)], &bytes, false)
            .unwrap_err();
        assert!(why.contains(want) && why.contains("of block 0,0,0"), "{why}");
    }
}

#[test]
fn a_source_may_have_its_own_form_of_a_tensor_map() {
    let own = "
        typedef struct CUtensorMap_st { alignas(128) unsigned long long opaque[16]; } CUtensorMap;
        static_assert(alignof(CUtensorMap) == 128, \"the emulator's own\");
        extern \"C\" __global__ void own(unsigned long long* out, const CUtensorMap map) {
            *out = map.opaque[15];
        }";
    if let Some(emulator) = compile(own, &[]) {
        assert_eq!(emulator.program().kernels()[0].name, "own");
    }
}
