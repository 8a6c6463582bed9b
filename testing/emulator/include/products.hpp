// Hopper's products of a warpgroup (`wgmma`), a part of the runtime.
//
// Four warps multiply 64 rows by 8 to 256 columns, of 32 bytes each. Shared memory has both, in a layout that a word of 64 bits tells. The
// rows may come from registers. A thread's sums stay where its variables are: a product adds to them at its start in one order of threads,
// and at the first wait of a thread of the warpgroup in the other. So a missing wait gives other results in one of the two.
//
// A thread may not touch a sum between a start and its wait, and needs a fence between a touch and the next start.

#pragma once

namespace emulator {

constexpr unsigned WARPGROUP = 128;

// ---- Matrices

// Elements of 16 bits, or `tf32`.
enum Element : unsigned { OF_F16, OF_BF16, OF_TF32 };

struct Matrix {
    unsigned at, lead, stride;
    // As a tensor map has it: 0 for none, to 3 for that of 128 bytes.
    unsigned swizzle;
    // An element's neighbours are those of the next rows, or columns.
    bool turned;

    // The place of the 16 bytes that begin with element `k` of a line; a turned matrix has there the elements `k` of eight lines.
    uintptr_t piece(unsigned line, unsigned k, unsigned bytes) const {
        const unsigned width = 16u << swizzle;
        unsigned offset;
        if (turned) {
            const unsigned part = line / 8, pieces = 1u << swizzle;
            offset = k % 8 * width + (swizzle ? part % pieces * 16 + part / pieces * lead + k / 8 * stride : part * stride + k / 8 * lead);
        } else {
            offset = line % 8 * width + line / 8 * stride + k * bytes / 16 * (swizzle ? 16 : lead);
        }
        const unsigned place = (at + offset) & 0x3ffff;
        return place_of(place ^ (place >> 3 & ((1u << swizzle) - 1) << 4), 16);
    }
};

Matrix matrix_of(Register word, bool turned) {
    constexpr unsigned SWIZZLES[] = {0, 3, 2, 1};
    constexpr Register MEANT = 0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 7ull << 49 | 3ull << 62;
    if (word & ~MEANT) broken("a matrix descriptor with the bits 0x%llx, which have no meaning", word & ~MEANT);
    if (word >> 49 & 7) broken("not emulated: a matrix descriptor with a base offset");
    const auto bytes = [&](unsigned bit) { return (unsigned)(word >> bit & 0x3fff) << 4; };
    return {bytes(0), bytes(16), bytes(32), SWIZZLES[word >> 62], turned};
}

struct Product {
    Matrix a, b;
    Element element;
    unsigned columns;
    // The sum so far counts; the signs of the factors; the thread's rows lie in `rows`.
    bool adds, registers;
    float sign;
    float rows[2][16];
    const Fiber* fiber;
    unsigned group;
    void* code;
    Product* next;
    float* sums[128];

    unsigned bytes() const { return element == OF_TF32 ? 4 : 2; }
    unsigned depth() const { return 32 / bytes(); }
    float value(unsigned bits) const {
        if (element == OF_TF32) return float_of(bits & 0xffffe000u);
        return element == OF_F16 ? f16_to_f32((unsigned short)bits) : from_bf16((unsigned short)bits);
    }
    float element_at(uintptr_t piece, unsigned i) const {
        return value(bytes() == 4 ? ((const unsigned*)piece)[i] : ((const unsigned short*)piece)[i]);
    }
    // A row of the first matrix, or a column of the second.
    void line(const Matrix& matrix, unsigned number, float (&to)[16]) const {
        const unsigned each = 16 / bytes();
        for (unsigned k = 0; k < depth(); ++k) {
            if (matrix.turned) {
                to[k] = element_at(matrix.piece(number, k, bytes()), number % 8);
            } else if (k % each == 0) {
                const uintptr_t at = matrix.piece(number, k, bytes());
                for (unsigned i = 0; i < each; ++i) to[k + i] = element_at(at, i);
            }
        }
    }
};
// The products of each warpgroup that have not run yet.
struct {
    Product *first, *last;
} started[FIBERS / WARPGROUP];

// The thread's part: lane 4 * n + i has columns 2 * i and 2 * i + 1 of eight, in rows n and n + 8 of its warp's 16.
void run(Product& product) {
    issued = product.code;
    const unsigned lane = product.fiber->number % 32, row = product.fiber->number % WARPGROUP / 32 * 16 + lane / 4;
    if (!product.registers) {
        for (unsigned half = 0; half < 2; ++half) product.line(product.a, row + 8 * half, product.rows[half]);
    }
    for (unsigned n = 0; n < product.columns / 4; ++n) {
        float column[16];
        product.line(product.b, n / 2 * 8 + lane % 4 * 2 + n % 2, column);
        for (unsigned half = 0; half < 2; ++half) {
            float& to = *product.sums[n / 2 * 4 + half * 2 + n % 2];
            double sum = 0;
            for (unsigned k = 0; k < product.depth(); ++k) sum += (double)product.rows[half][k] * (double)column[k];
            to = (float)((product.adds ? (double)to : 0.0) + product.sign * sum);
        }
    }
}

// Calls `f` for each 16 bytes that a warp's part reads.
template <class F> void pieces(const Product& product, unsigned warp, F f) {
    const auto lines = [&](const Matrix& matrix, unsigned from, unsigned count) {
        for (unsigned n = from; n < from + count; n += matrix.turned ? 8 : 1) {
            for (unsigned k = 0; k < product.depth(); k += matrix.turned ? 1 : 16 / product.bytes()) f(matrix.piece(n, k, product.bytes()));
        }
    };
    if (!product.registers) lines(product.a, warp * 16, 16);
    lines(product.b, 0, product.columns);
}

// ---- Sums

// Neighbours in the thread's memory, to which products add.
struct Sums {
    uintptr_t from, to;
    // The group of the last product, and whether the thread has touched them since its last fence.
    unsigned group;
    bool touched;
};
// More lists than these are not looked at.
constexpr unsigned SUMS = 8;

void look_at_sums(uintptr_t at, size_t bytes, unsigned access, void* code) {
    Fiber& fiber = *block.running;
    for (unsigned i = 0; i < fiber.sum_lists; ++i) {
        Sums& sums = ((Sums*)fiber.sums)[i];
        if (at >= sums.to || at + bytes <= sums.from) continue;
        if (sums.group >= fiber.products_over) {
            issued = code;
            broken("it %ss a sum of a product that may still run, without wgmma.wait_group between the two", access & 2 ? "write" : "read");
        }
        sums.touched = true;
    }
}

// The lists of a product's sums, which the thread may not touch from now on.
void keep_sums(Fiber& fiber, float* const* sums, unsigned count) {
    if (!fiber.sums) fiber.sums = calloc(SUMS, sizeof(Sums));
    if (!fiber.sums) fail("no host memory is left");
    for (unsigned i = 0; i < count;) {
        const uintptr_t from = (uintptr_t)sums[i], stack = (uintptr_t)fiber.stack;
        if (from - stack >= STACK) broken("not emulated: a product whose sums are no variables of the thread");
        unsigned end = i + 1;
        while (end < count && sums[end] == sums[i] + (end - i)) ++end;
        const uintptr_t to = from + (end - i) * sizeof(float);
        i = end;
        Sums *all = (Sums*)fiber.sums, *own = nullptr;
        for (unsigned n = 0; n < fiber.sum_lists && !own; ++n) {
            if (all[n].from == from && all[n].to == to) own = all + n;
        }
        if (own && own->touched) broken("a product whose sums its thread has touched, without wgmma.fence between the two");
        // A list of variables that are gone gives its place.
        for (unsigned n = 0; n < fiber.sum_lists && !own; ++n) {
            if (all[n].group < fiber.products_over) own = all + n;
        }
        if (!own && fiber.sum_lists < SUMS) own = all + fiber.sum_lists++;
        if (own) *own = {from, to, fiber.product_groups, false};
    }
}

// ---- Starts and waits

// All lanes of a warp meet with the same word.
void agree(Register word, const char* what, void* code) {
    const Group* group = join(~0u, &word, sizeof(word), what);
    const Register* all = (const Register*)group->slots;
    issued = code;
    if (group->arrived != ~0u) broken("%s that not all 32 threads of a warp reach", what);
    for (unsigned l = 0; l < 32; ++l) {
        if (all[l] != word) broken("%s with other operands in lane %u of the warp", what, l);
    }
}

Agent* agent_of_products(unsigned warpgroup) {
    Agent* agent = agent_of((char*)(fibers_of_block() + warpgroup * WARPGROUP) + 2, block.rank);
    if (agent) agent->name = "a product";
    return agent;
}

__attribute__((used)) void products_fence() {
    agree(0, "wgmma.fence", __builtin_return_address(0));
    Fiber& fiber = *block.running;
    fiber.products_fenced = true;
    for (unsigned i = 0; i < fiber.sum_lists; ++i) ((Sums*)fiber.sums)[i].touched = false;
}

__attribute__((used)) void start_product(unsigned element, unsigned columns, float* const* sums, const unsigned* words, const Register (&of)[7]) {
    void* const code = issued = __builtin_return_address(0);
    Fiber& fiber = *block.running;
    const unsigned warpgroup = fiber.number / WARPGROUP;
    const auto [a, b, adds, sign_a, sign_b, turned_a, turned_b] = of;
    if (block.count < (warpgroup + 1) * WARPGROUP) broken("a product of a warpgroup in a block of %u threads", block.count);
    const auto is_sign = [](Register sign) { return (int)sign == 1 || (int)sign == -1; };
    if (!is_sign(sign_a) || !is_sign(sign_b)) broken("a product whose factors are multiplied by neither 1 nor -1");
    if (turned_a > 1 || turned_b > 1) broken("a product whose matrices are transposed by neither 0 nor 1");
    settle();
    Product product = {};
    product.element = (Element)element;
    product.columns = columns;
    product.adds = adds != 0;
    product.registers = words != nullptr;
    product.sign = (float)((int)sign_a * (int)sign_b);
    agree((words ? 0 : a) ^ (b << 32 | b >> 32) ^ product.adds, "wgmma.mma_async", code);
    const unsigned quarter = lane() / 4 * 4, each = 4 / product.bytes();
    for (unsigned w = 0; words && w < 4; ++w) {
        const unsigned* all = exchange(words[w], "wgmma.mma_async");
        for (unsigned i = 0; i < 4 * each; ++i) {
            const unsigned word = all[quarter + i / each], bits = each == 2 ? word >> i % 2 * 16 & 0xffff : word;
            product.rows[w % 2][w / 2 * (product.depth() / 2) + i] = product.value(bits);
        }
    }
    issued = code;
    if (!product.registers) product.a = matrix_of(a, turned_a);
    product.b = matrix_of(b, turned_b);
    product.fiber = &fiber;
    product.group = fiber.product_groups;
    product.code = code;
    memcpy(product.sums, sums, columns / 2 * sizeof(float*));
    if (!fiber.products_fenced) broken("a product without wgmma.fence in front of the thread's first one");
    keep_sums(fiber, sums, columns / 2);
    fiber.products = fiber.product_groups + 1;
    if (knowledge && lane() == 0) {
        const Agent* agent = agent_of_products(warpgroup);
        pieces(product, fiber.number % WARPGROUP / 32, [&](uintptr_t at) { trace_agent(at, 16, false, agent, product.group, block.rank); });
    }
    if (!launched->reverse) return run(product);
    Product* kept = (Product*)malloc(sizeof(Product));
    if (!kept) fail("no host memory is left");
    *kept = product;
    auto& list = started[(&fiber - block.fibers) / WARPGROUP];
    (list.first ? list.last->next : list.first) = kept;
    list.last = kept;
}

__attribute__((used)) void products_commit() {
    agree(0, "wgmma.commit_group", __builtin_return_address(0));
    ++block.running->product_groups;
}

__attribute__((used)) void products_wait(Register left) {
    void* const code = __builtin_return_address(0);
    agree(left, "wgmma.wait_group", code);
    settle();
    Fiber& fiber = *block.running;
    const unsigned done = fiber.product_groups > (unsigned)left ? fiber.product_groups - (unsigned)left : 0;
    const unsigned warpgroup = fiber.number / WARPGROUP;
    const Fiber* first = fibers_of_block() + warpgroup * WARPGROUP;
    // A product is over when all warps have started it.
    for (unsigned i = 0; done > fiber.products_over && i < WARPGROUP;) {
        if (first[i].product_groups >= done) {
            ++i;
            continue;
        }
        fiber.waits = "wgmma.wait_group";
        yield();
        fiber.waits = nullptr;
    }
    auto& list = started[(&fiber - block.fibers) / WARPGROUP];
    for (Product** link = &list.first; *link;) {
        Product* product = *link;
        if (product->group >= done) {
            list.last = product;
            link = &product->next;
            continue;
        }
        run(*product);
        *link = product->next;
        free(product);
    }
    issued = code;
    if (done > fiber.products_over) fiber.products_over = done;
    block.progress = true;
    if (done > 0) learn_from(agent_of_products(warpgroup), done);
}

// A thread ends.
void end_products() {
    const Fiber& fiber = *block.running;
    issued = nullptr;
    if (fiber.products > fiber.products_over) broken("a thread ends before its products are over (wgmma.wait_group)");
}

// A launch begins. The one before may have failed.
void begin_products() {
    for (auto& list : started) {
        while (Product* product = list.first) {
            list.first = product->next;
            free(product);
        }
    }
}

}  // namespace emulator
