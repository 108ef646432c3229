"Other people's trainers on the served environment."
import pytest

for package in ('openenv', 'torch', 'trl'): pytest.importorskip(package)
import datasets
import torch

from stocker.training.pocket import load_pocket
from stocker.serving.server import served
from stocker.serving.trials import ServedDecision, served_rewards

# The template of the pocket model, and calls of tools in it: TRL wants to see some, though the environment has none.
TEMPLATE = (
    "<start>{% for message in messages %}{{ '<moderator>' if message.role == 'assistant' else '<user>' }}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<moderator>{% endif %}")


@pytest.mark.filterwarnings('ignore')
def test_the_pocket_moderator_learns_from_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv('TRL_EXPERIMENTAL_SILENCE', '1')
    from trl import GRPOConfig, GRPOTrainer
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    student = load_pocket()
    student.tokenizer.chat_template = TEMPLATE
    before = {name: weight.clone() for name, weight in student.model.state_dict().items()}
    rows = [{'prompt': [{'role': 'user', 'content': ''}], 'task': task, 'before': [{'side': 'buy', 'quantity': count}]}
            for task in ('task_easy', 'task_medium') for count in (5, 20)]
    arguments = GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=8, num_generations=4, learning_rate=1e-3,
        max_completion_length=8, use_cpu=True, bf16=False, report_to='none', save_strategy='no', logging_steps=1,
        disable_tqdm=True, seed=0, gradient_checkpointing=False)
    with served() as url:
        made = []

        def factory():
            made.append(ServedDecision(url))
            return made[-1]
        trainer = GRPOTrainer(
            model=student.model, processing_class=student.tokenizer, args=arguments, environment_factory=factory,
            train_dataset=datasets.Dataset.from_list(rows), reward_funcs=[served_rewards])
        trainer.train()
        states = [environment.client.state() for environment in made]
        for environment in made: environment.client.close()
    torch.set_num_threads(threads)
    rewards = [line['reward'] for line in trainer.state.log_history if 'reward' in line]
    assert len(rewards) == 2 and all(-5 < reward <= 5 for reward in rewards)
    assert len(made) == 8 and all(state.step_count == 6 for state in states)
    assert any((before[name] != weight).any() for name, weight in student.model.state_dict().items())
