"""Over which links a shadow's weights come where no plan moves boxes: a whole model to each rank that infers."""

from hfsdk.core.layout import Layout
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.calls.shadow_plan import received_by_link


def test_a_shadow_that_infers_gets_the_whole_model_over_the_network_from_another_node_alone():
    model = ModelSpec.preset("llama-7b")
    critic = RoleSpec(
        name="critic", kind="critic", head="scalar", model=model, train=Layout.parse("tp2 pp1 dp1"), dtype="bf16",
        optimizer=AdamW(), nodes=(0, 0),
    )  # fmt: skip
    shadow = RoleSpec(
        name="critic.inference", kind="critic", head="scalar", model=model, train=Layout.parse("tp1 pp1 dp2"), dtype="bf16",
        shadow_of="critic", nodes=(0, 1),
    )  # fmt: skip
    here, there = received_by_link(critic, shadow)
    size = model.num_bytes("bf16")
    assert sum(here.values()) == sum(there.values()) == size
    assert (here["network"], there["network"]) == (0, size)
