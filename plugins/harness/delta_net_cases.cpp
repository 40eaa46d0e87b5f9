#include "delta_net_cases.h"

#include "plugin_host.h"

#include <array>

using namespace host;

namespace
{

using Doubles = std::vector<double>;

constexpr int kSlots = 3;
constexpr int kTaps = 4;
constexpr int kInputs = 14;
constexpr int kFirstPart = 9; // of what is kept of slots, among inputs
constexpr int kParts = 5;
constexpr int kOutputs = 1 + kParts;
constexpr double kEps = 1e-6;

struct Case
{
    char const* name;
    DataType type;
    int key_heads;
    int value_heads;
    int size;
    int pending;
    bool is_in_place;

    int channels() const
    {
        return (2 * key_heads + value_heads) * size;
    }
    int columns() const
    {
        return channels() + value_heads * size;
    }
};

// Rows of each slot in a step, and how many of them stay.
struct Step
{
    std::array<int, kSlots> counts;
    std::array<int, kSlots> kept;
};

struct Weights
{
    Bits conv;
    std::vector<float> a_log, dt_bias, norm;
};

Weights random_weights(Case const& c)
{
    std::uniform_real_distribution<float> rate(-5.f, -2.f);
    std::normal_distribution<float> normal;
    Weights w{random_bits(size_t(c.channels()) * kTaps, c.type), {}, {}, {}};
    for (auto& each : w.conv)
    {
        each = encoded(decoded(each, c.type) / 2, c.type);
    }
    for (int h = 0; h < c.value_heads; ++h)
    {
        w.a_log.push_back(rate(generator));
        w.dt_bias.push_back(normal(generator));
    }
    for (int d = 0; d < c.size; ++d)
    {
        w.norm.push_back(1 + normal(generator) / 10);
    }
    return w;
}

// -- float64 ----------------------------------------------------------------------------------------------------------

double sigmoid(double x)
{
    return 1 / (1 + std::exp(-x));
}

// One slot's net, a row after the other.
class Recurrence
{
public:
    Recurrence(Case const& c, Weights const& w)
        : c_(c)
        , w_(w)
        , conv_(decoded(w.conv, c.type))
    {
        begin();
    }

    void begin()
    {
        states_.assign(1, Doubles(size_t(c_.value_heads) * c_.size * c_.size));
        inputs_.assign(kTaps - 1, Doubles(c_.channels()));
    }

    // What rows give [count, Hv * D]; how many of them stay is said by `keep`.
    Doubles run(Doubles const& x, Doubles const& gates, int count)
    {
        Doubles out;
        for (int t = 0; t < count; ++t)
        {
            double const* const row = x.data() + size_t(t) * c_.columns();
            inputs_.emplace_back(row, row + c_.channels());
            Doubles const y = read(mixed(), gates.data() + size_t(t) * 2 * c_.value_heads, row + c_.channels());
            out.insert(out.end(), y.begin(), y.end());
        }
        return out;
    }

    void keep(int count)
    {
        states_.assign(1, Doubles(states_[count]));
        inputs_ = {inputs_.begin() + count, inputs_.begin() + count + kTaps - 1};
    }

    // Behind so many of the last rows: [Hv, D values, D keys].
    Doubles const& state(int count) const
    {
        return states_[count];
    }

private:
    // The convolution of the last rows.
    Doubles mixed() const
    {
        Doubles y(c_.channels());
        for (int i = 0; i < c_.channels(); ++i)
        {
            for (int tap = 0; tap < kTaps; ++tap)
            {
                y[i] += conv_[size_t(i) * kTaps + tap] * inputs_[inputs_.size() - kTaps + tap][i];
            }
            y[i] *= sigmoid(y[i]);
        }
        return y;
    }

    // Takes the state through one row.
    Doubles read(Doubles const& y, double const* gates, double const* z)
    {
        int const size = c_.size, keys = c_.key_heads * size;
        Doubles state = states_.back();
        Doubles out(size_t(c_.value_heads) * size);
        for (int h = 0; h < c_.value_heads; ++h)
        {
            int const owner = h / (c_.value_heads / c_.key_heads);
            Doubles const q = unit(y.data() + owner * size, 1 / std::sqrt(double(size)));
            Doubles const k = unit(y.data() + keys + owner * size, 1);
            double const* const v = y.data() + 2 * keys + h * size;
            double const bent = gates[c_.value_heads + h] + w_.dt_bias[h];
            double const decay = std::exp(-std::exp(double(w_.a_log[h])) * std::log1p(std::exp(bent)));
            double squares = 0;
            for (int j = 0; j < size; ++j)
            {
                double* const s = state.data() + (size_t(h) * size + j) * size;
                double known = 0, shown = 0;
                for (int i = 0; i < size; ++i)
                {
                    s[i] *= decay;
                    known += s[i] * k[i];
                }
                double const write = sigmoid(gates[h]) * (v[j] - known);
                for (int i = 0; i < size; ++i)
                {
                    s[i] += k[i] * write;
                    shown += s[i] * q[i];
                }
                out[h * size + j] = shown;
                squares += shown * shown;
            }
            for (int j = 0; j < size; ++j)
            {
                double const gate = z[h * size + j];
                out[h * size + j] *= w_.norm[j] * gate * sigmoid(gate) / std::sqrt(squares / size + kEps);
            }
        }
        states_.push_back(state);
        return out;
    }

    Doubles unit(double const* x, double scale) const
    {
        double squares = 1e-6;
        for (int i = 0; i < c_.size; ++i)
        {
            squares += x[i] * x[i];
        }
        Doubles y(x, x + c_.size);
        for (double& each : y)
        {
            each *= scale / std::sqrt(squares);
        }
        return y;
    }

    Case const& c_;
    Weights const& w_;
    Doubles conv_;
    std::vector<Doubles> states_; // before the last rows, and behind each
    std::vector<Doubles> inputs_; // rows of the convolution
};

// -- the plugin -------------------------------------------------------------------------------------------------------

IPluginV3* created(IPluginCreatorV3One& creator, Case const& c)
{
    int32_t const numbers[] = {c.key_heads, c.value_heads, c.size};
    float const eps = static_cast<float>(kEps);
    PluginField const fields[] = {{"key_heads", &numbers[0], PluginFieldType::kINT32, 1},
        {"value_heads", &numbers[1], PluginFieldType::kINT32, 1},
        {"head_size", &numbers[2], PluginFieldType::kINT32, 1}, {"norm_eps", &eps, PluginFieldType::kFLOAT32, 1}};
    PluginFieldCollection const collection{4, fields};
    return creator.createPlugin("layer", &collection, TensorRTPhase::kBUILD);
}

// Inputs of a step of so many rows, then outputs.
std::vector<PluginTensorDesc> described(Case const& c, int rows)
{
    int64_t const keys = c.key_heads, values = c.value_heads, size = c.size, channels = c.channels();
    DataType const wide = DataType::kFLOAT, ints = DataType::kINT32;
    std::vector<PluginTensorDesc> all{host::described({kSlots, rows, c.columns()}, c.type),
        host::described({kSlots, rows, 2 * values}, c.type), host::described({kSlots}, ints),
        host::described({kSlots}, ints), host::described({kSlots}, ints), host::described({channels, kTaps}, c.type),
        host::described({values}, wide), host::described({values}, wide), host::described({size}, wide),
        host::described({kSlots, values, size, size}, wide), host::described({kSlots, c.pending, values, size}, wide),
        host::described({kSlots, c.pending, keys, size}, wide), host::described({kSlots, c.pending, values}, wide),
        host::described({kSlots, kTaps - 1 + c.pending, channels}, c.type),
        host::described({kSlots, rows, values * size}, c.type)};
    for (int i = 0; i < kParts; ++i)
    {
        PluginTensorDesc const part = all[kFirstPart + i];
        all.push_back(part);
    }
    return all;
}

size_t bytes_of(PluginTensorDesc const& desc)
{
    size_t bytes = desc.type == DataType::kFLOAT || desc.type == DataType::kINT32 ? 4 : 2;
    for (int i = 0; i < desc.dims.nbDims; ++i)
    {
        bytes *= desc.dims.d[i];
    }
    return bytes;
}

std::vector<DynamicPluginTensorDesc> dynamic(std::vector<PluginTensorDesc> const& descs)
{
    std::vector<DynamicPluginTensorDesc> all;
    for (auto const& desc : descs)
    {
        all.push_back({desc, desc.dims, desc.dims, desc.dims});
    }
    return all;
}

// Asks what TensorRT asks while it builds.
void check_build(IPluginV3& plugin, Case const& c)
{
    auto& build = capability_of<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
    std::vector<PluginTensorDesc> const descs = described(c, 7);
    std::vector<DynamicPluginTensorDesc> all = dynamic(descs);
    std::vector<DataType> types;
    for (int i = 0; i < kInputs + kOutputs; ++i)
    {
        types.push_back(descs[i].type);
        require(build.supportsFormatCombination(i, all.data(), kInputs, kOutputs), "a format is refused");
        all[i].desc.type = DataType::kINT8;
        require(!build.supportsFormatCombination(i, all.data(), kInputs, kOutputs), "INT8 is accepted");
        all[i].desc.type = types.back();
    }
    DataType out_types[kOutputs];
    require(build.getNbOutputs() == kOutputs
            && build.getOutputDataTypes(out_types, kOutputs, types.data(), kInputs) == 0
            && std::equal(out_types, out_types + kOutputs, types.begin() + kInputs),
        "output types");
    require(build.configurePlugin(all.data(), kInputs, all.data() + kInputs, kOutputs) == 0, "configurePlugin");
    require(build.configurePlugin(all.data(), kInputs - 1, all.data() + kInputs, kOutputs) != 0, "an input too few");
    Sizes sizes;
    DimsExprs in[kInputs] = {};
    DimsExprs out[kOutputs] = {};
    for (int i = 0; i < kInputs; ++i)
    {
        in[i].nbDims = descs[i].dims.nbDims;
        for (int d = 0; d < in[i].nbDims; ++d)
        {
            in[i].d[d] = sizes.constant(descs[i].dims.d[d]);
        }
    }
    require(build.getOutputShapes(in, kInputs, nullptr, 0, out, kOutputs, sizes) == 0, "getOutputShapes");
    for (int i = 0; i < kOutputs; ++i)
    {
        Dims const& wanted = descs[kInputs + i].dims;
        require(out[i].nbDims == wanted.nbDims, "the number of an output's dimensions");
        for (int d = 0; d < wanted.nbDims; ++d)
        {
            require(out[i].d[d]->getConstantValue() == wanted.d[d], "the shape of output " + std::to_string(i));
        }
    }
}

// Asks a plugin in an execution context for shapes: takes its own, and no others.
void check_shapes(IPluginV3& attached, Case const& c)
{
    auto& runtime = capability_of<IPluginV3OneRuntime>(attached, PluginCapabilityType::kRUNTIME);
    std::vector<PluginTensorDesc> const descs = described(c, 7);
    auto const takes = [&](std::vector<PluginTensorDesc> const& given)
    { return runtime.onShapeChange(given.data(), kInputs, descs.data() + kInputs, kOutputs) == 0; };
    require(takes(descs), "onShapeChange");
    for (int i = 0; i < kInputs; ++i)
    {
        for (int d = 0; d < descs[i].dims.nbDims; ++d)
        {
            std::vector<PluginTensorDesc> other = descs;
            ++other[i].dims.d[d];
            require(!takes(other), "input " + std::to_string(i) + " of another shape is accepted");
        }
    }
}

// -- on a GPU ---------------------------------------------------------------------------------------------------------

// The slots of a net, on the GPU and in float64.
class Slots
{
public:
    Slots(Case const& c, IPluginV3& built, IPluginV3& attached)
        : c_(c)
        , weights_(random_weights(c))
        , build_(capability_of<IPluginV3OneBuild>(built, PluginCapabilityType::kBUILD))
        , runtime_(capability_of<IPluginV3OneRuntime>(attached, PluginCapabilityType::kRUNTIME))
        , own_(kSlots, Recurrence(c_, weights_))
    {
        constants_.push_back(on_device(weights_.conv));
        for (auto const* each : {&weights_.a_log, &weights_.dt_bias, &weights_.norm})
        {
            constants_.push_back(on_device(*each));
        }
        std::vector<PluginTensorDesc> const descs = described(c, 1);
        for (int i = 0; i < kParts; ++i) // NaN, which a sequence's first step must not read
        {
            past_.push_back(poisoned(bytes_of(descs[kFirstPart + i])));
            other_.push_back(poisoned(bytes_of(descs[kFirstPart + i])));
        }
        check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    }

    ~Slots()
    {
        cudaStreamDestroy(stream_);
    }

    // Begins a slot's next sequence: nothing is cleared.
    void begin(int slot)
    {
        own_[slot].begin();
        start_[slot] = 0;
    }

    // Runs a step, eagerly or captured, and compares: the relative error of what rows give.
    double run(Step const& step, bool is_captured)
    {
        int const rows = *std::max_element(step.counts.begin(), step.counts.end());
        Bits const x = random_bits(size_t(kSlots) * rows * c_.columns(), c_.type);
        Bits const gates = random_bits(size_t(kSlots) * rows * 2 * c_.value_heads, c_.type);
        std::vector<std::vector<uint8_t>> const before = parts();
        Bits const out = enqueued(x, gates, step, rows, is_captured);
        double const error = compared_rows(x, gates, out, step, rows);
        compare_states(step, before);
        return error;
    }

private:
    Bits enqueued(Bits const& x, Bits const& gates, Step const& step, int rows, bool is_captured)
    {
        std::vector<PluginTensorDesc> const descs = described(c_, rows);
        std::vector<Buffer> given;
        given.push_back(on_device(x));
        given.push_back(on_device(gates));
        std::array<int, kSlots> const* const integers[] = {&start_, &step.counts, &length_};
        for (auto const* each : integers)
        {
            given.push_back(on_device(std::vector<int32_t>(each->begin(), each->end())));
        }
        std::vector<void const*> in;
        std::vector<void*> out;
        for (auto const* buffers : {&given, &constants_, &past_})
        {
            std::transform(
                buffers->begin(), buffers->end(), std::back_inserter(in), [](Buffer const& b) { return b.get(); });
        }
        Buffer const result = poisoned(bytes_of(descs[kInputs]));
        out.push_back(result.get());
        for (int i = 0; i < kParts; ++i)
        {
            out.push_back((c_.is_in_place ? past_ : other_)[i].get());
        }
        std::vector<DynamicPluginTensorDesc> const all = dynamic(descs);
        size_t const scratch = build_.getWorkspaceSize(all.data(), kInputs, all.data() + kInputs, kOutputs);
        require(scratch > 0, "getWorkspaceSize");
        Buffer const workspace = poisoned(scratch);
        auto const enqueue = [&]()
        {
            return runtime_.enqueue(
                descs.data(), descs.data() + kInputs, in.data(), out.data(), workspace.get(), stream_);
        };
        if (is_captured) // which runs nothing by itself
        {
            cudaGraph_t graph;
            cudaGraphExec_t executable;
            check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capture");
            require(enqueue() == 0, "enqueue while capturing");
            check(cudaStreamEndCapture(stream_, &graph), "capture");
            check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
            check(cudaGraphLaunch(executable, stream_), "replay");
            check(cudaStreamSynchronize(stream_), "replay");
            check(cudaGraphExecDestroy(executable), "destroy");
            check(cudaGraphDestroy(graph), "destroy");
        }
        else
        {
            require(enqueue() == 0, "enqueue");
            check(cudaStreamSynchronize(stream_), "enqueue's kernels");
        }
        if (!c_.is_in_place)
        {
            std::swap(past_, other_);
        }
        return on_host(result.get(), bytes_of(descs[kInputs]) / 2);
    }

    double compared_rows(Bits const& x, Bits const& gates, Bits const& out, Step const& step, int rows)
    {
        Doubles found, expected;
        size_t const width = size_t(c_.value_heads) * c_.size;
        auto const rows_of = [&](Bits const& from, int slot, size_t columns)
        {
            auto const first = from.begin() + size_t(slot) * rows * columns;
            return decoded(Bits(first, first + step.counts[slot] * columns), c_.type);
        };
        for (int b = 0; b < kSlots; ++b)
        {
            Doubles const own
                = own_[b].run(rows_of(x, b, c_.columns()), rows_of(gates, b, 2 * c_.value_heads), step.counts[b]);
            expected.insert(expected.end(), own.begin(), own.end());
            Doubles const theirs = rows_of(out, b, width);
            found.insert(found.end(), theirs.begin(), theirs.end());
            auto const first = out.begin() + size_t(b) * rows * width;
            require(
                std::all_of(first + step.counts[b] * width, first + rows * width, [](uint16_t n) { return n == 0; }),
                "a row of nobody is not zero");
        }
        return compared(found, expected, c_.type == DataType::kHALF ? 2e-3 : 1.6e-2, "rows");
    }

    void compare_states(Step const& step, std::vector<std::vector<uint8_t>> const& before)
    {
        std::vector<std::vector<uint8_t>> const after = parts();
        for (int b = 0; b < kSlots; ++b)
        {
            for (int i = 0; i < kParts && step.counts[b] == 0; ++i)
            {
                size_t const size = after[i].size() / kSlots;
                require(std::memcmp(&after[i][b * size], &before[i][b * size], size) == 0,
                    "a slot that takes no part was touched");
            }
            if (step.counts[b] > 0)
            {
                int const absorbed = std::max(0, step.counts[b] - c_.pending);
                length_[b] = start_[b] + absorbed;
                if (length_[b] > 0) // else it is zero, whatever lies there
                {
                    size_t const size = own_[b].state(0).size();
                    std::vector<float> state(size);
                    std::memcpy(state.data(), &after[0][b * size * 4], size * 4);
                    compared(Doubles(state.begin(), state.end()), own_[b].state(absorbed), 1e-4, "a state");
                }
                own_[b].keep(step.kept[b]);
                start_[b] += step.kept[b];
            }
        }
    }

    // What is kept of all slots, as it lies.
    std::vector<std::vector<uint8_t>> parts() const
    {
        std::vector<std::vector<uint8_t>> all;
        std::vector<PluginTensorDesc> const descs = described(c_, 1);
        for (int i = 0; i < kParts; ++i)
        {
            all.emplace_back(bytes_of(descs[kFirstPart + i]));
            check(
                cudaMemcpy(all.back().data(), past_[i].get(), all.back().size(), cudaMemcpyDeviceToHost), "copy back");
        }
        return all;
    }

    Case const c_;
    Weights const weights_;
    IPluginV3OneBuild& build_;
    IPluginV3OneRuntime& runtime_;
    std::vector<Recurrence> own_;
    std::vector<Buffer> constants_, past_, other_;
    std::array<int, kSlots> start_{};
    std::array<int, kSlots> length_{5, 5, 5}; // where earlier sequences stood
    cudaStream_t stream_ = nullptr;
};

void run_steps(Case const& c, IPluginV3& built, IPluginV3& attached)
{
    int const most = c.pending;
    // A prompt's rows stay, a block's in part; a slot rests; and the last one's next sequence begins.
    Step const steps[] = {{{37, 5, most}, {37, 5, most}}, {{most, 0, 3}, {1, 0, 2}}, {{most, most, 0}, {most, 3, 0}},
        {{1, 2, most}, {1, 1, most - 1}}, {{most, 70, 21}, {2, 70, 21}}, {{3, most, most}, {2, 2, 1}}};
    Slots slots(c, built, attached);
    double worst = 0;
    bool is_captured = false;
    for (Step const& step : steps)
    {
        if (&step == &steps[4])
        {
            slots.begin(2);
        }
        worst = std::max(worst, slots.run(step, is_captured));
        is_captured = !is_captured;
    }
    std::printf("%-44s relative error %.1e\n", c.name, worst);
}

} // namespace

size_t check_delta_nets(IPluginCreatorV3One& creator, bool has_gpu)
{
    require(std::string(creator.getPluginName()) == "DFlashDeltaNet" && std::string(creator.getPluginVersion()) == "3"
            && std::string(creator.getPluginNamespace()) == "dflash" && creator.getFieldNames()->nbFields == 4,
        "the creator of gated delta nets is another");
    Case const wrong{"", DataType::kBF16, 2, 5, 128, 16, true};
    require(created(creator, wrong) == nullptr, "5 value heads share 2 key heads");
    constexpr DataType kBf16 = DataType::kBF16;
    constexpr DataType kHalf = DataType::kHALF;
    Case const cases[] = {
        {"delta net, BF16, 3 values a key (27B)", kBf16, 4, 12, 128, 16, true},
        {"delta net, FP16, 2 values a key", kHalf, 4, 8, 128, 16, true},
        {"delta net, BF16, 32 heads, blocks of 8", kBf16, 16, 32, 128, 8, true},
        {"delta net, heads of 64", kBf16, 2, 2, 64, 16, true},
        {"delta net, heads of 16, blocks of 4", kHalf, 2, 6, 16, 4, true},
        {"delta net, present elsewhere than past", kBf16, 2, 6, 128, 16, false},
    };
    for (Case const& c : cases)
    {
        std::unique_ptr<IPluginV3> const built(created(creator, c));
        require(built != nullptr, "no plugin was created");
        check_build(*built, c);
        std::unique_ptr<IPluginV3> const attached = loaded(creator, *built);
        check_shapes(*attached, c);
        if (has_gpu)
        {
            run_steps(c, *built, *attached);
        }
    }
    return std::size(cases);
}
